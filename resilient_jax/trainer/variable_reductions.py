"""What becomes of a variable that the microbatches of a step change: the rules of the user, applied.

Every microbatch starts from the committed variables, so a step has as many new values of a variable as it has
microbatches. A rule makes one of them, from a sum over microbatches, which is the same whichever hosts computed them.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from resilient_jax.argument_checks import describe_value
from resilient_jax.errors import CallerError
from resilient_jax.sharding.jaxprs import CALLS, get_body, get_scan_arity, unwrap_jaxpr, walk
from resilient_jax.trainer.model_adapters import BATCH_STATS, NNX_BATCH_STATS, NNX_PARAMS, Variables
from resilient_jax.trainer.training_state import check_same_types

Tree = Any
"""A pytree of arrays."""
Source = int | None
"""The position of the argument that a value is equal to; None: it is computed."""


class VariableReduction(enum.StrEnum):
    """How the values that the microbatches of a step give a variable become one."""

    MEAN = "mean"
    """Their mean. Of floating-point variables."""
    FIRST = "first"
    """The value after the first microbatch; unchanged if that one is skipped."""
    SUM = "sum"
    """The committed value and the changes of all microbatches."""
    DISCARD = "discard"
    """The committed value: changes are dropped."""


ReductionFunction = Callable[..., Any]
"""`function(old, mean)` returns the new value from the committed one and the mean over microbatches, which is in
float32 at least."""
Rule = VariableReduction | ReductionFunction
DEFAULT_RULES: Final[Mapping[str, Rule]] = {
    BATCH_STATS: VariableReduction.MEAN,
    NNX_BATCH_STATS: VariableReduction.MEAN,
}
EXPECTED_RULE: Final = (
    '"mean" over microbatches, "first" microbatch, "sum" of the changes, "discard", or a function (old, mean)'
)


class ChangedLeaf(NamedTuple):
    """A leaf of the variables that the loss function changes.

    Attributes:
        position: index among the leaves of the collections.
        rule: rule of the leaf; never DISCARD.
    """

    position: int
    rule: Rule


def check_rules(rules: object) -> dict[str, Rule]:
    """Return the user's rules by name, with the default ones.

    Raises:
        CallerError: `rules` is no dict of names or types to rules.
    """
    if not isinstance(rules, Mapping):
        raise CallerError(
            f"variable_reductions: found {describe_value(rules)}, expected a dict of Linen collections or NNX types to "
            f'rules, such as {{"Count": "sum"}}. A rule is {EXPECTED_RULE}'
        )
    checked: dict[str, Rule] = dict(DEFAULT_RULES)
    for key, rule in rules.items():
        name = key.__name__ if isinstance(key, type) else key
        if not isinstance(name, str):
            raise CallerError(
                f"variable_reductions: found the key {key!r}, expected a Linen collection or an NNX type"
            )
        if not callable(rule) and rule not in list(VariableReduction):
            raise CallerError(f"variable_reductions: found {rule!r} for {name}, expected {EXPECTED_RULE}")
        checked[name] = rule if callable(rule) else VariableReduction(rule)
    return checked


class VariableReducer:
    """Reduces the values of all changed variables.

    A tree of *contributions* has the structure of the collections, with None in place of each leaf that is not changed.
    """

    def __init__(self, rules: Mapping[str, Rule], before: Variables, after: Variables, jaxpr: Any) -> None:  # noqa: ANN401 - closed
        """Find the changed variables.

        Args:
            rules: rules as `check_rules` returns them.
            before: shapes of the variables.
            after: shapes of the variables after the loss function.
            jaxpr: program of a function of the variables, and of other arguments after them, that returns the variables
                after the loss function, and other results after these.

        Raises:
            CallerError: a variable is changed that has no rule, or an unsuitable one; a rule is for no variable.
        """
        self._treedef = jax.tree.structure(before.collections)
        old = {_Leaf.of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(before)}
        new = {_Leaf.of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(after)}
        _check_names(rules, {leaf.name for leaf in (*old, *new)})
        sources, places = find_sources(jaxpr), {leaf: place for place, leaf in enumerate(old)}
        # A variable is unchanged if what comes out in its place is the argument that goes in there.
        changed = [leaf for leaf, source in zip(new, sources, strict=False) if places.get(leaf, -1) != source]
        _check_changes(rules, changed, old, new)
        in_collections = [leaf for leaf in old if leaf.is_in_collection]
        self._changed = [
            ChangedLeaf(in_collections.index(leaf), rules[leaf.name])
            for leaf in changed
            if rules[leaf.name] != VariableReduction.DISCARD
        ]
        # `position` counts the leaves of the collections before; `_find`
        # has the places among all leaves after the loss.
        self._find = [list(new).index(in_collections[one.position]) for one in self._changed]
        for leaf in (in_collections[one.position] for one in self._changed):
            check_same_types({str(leaf): old[leaf]}, {str(leaf): new[leaf]}, "model")

    def contribute(self, before: Variables, after: Variables, index: jax.Array) -> Tree:
        """Return what microbatch `index` contributes to the sums."""
        old, leaves = jax.tree.leaves(before.collections), jax.tree.leaves(after)
        return self._unflatten(
            _contribute(one.rule, old[one.position], leaves[place], index)
            for one, place in zip(self._changed, self._find, strict=True)
        )

    def contribute_skipped(self, before: Variables, index: jax.Array) -> Tree:
        """Return what a skipped microbatch contributes: if it is the first, committed values for rules of it."""
        old = jax.tree.leaves(before.collections)
        return self._unflatten(
            _contribute(one.rule, old[one.position], old[one.position], index)
            if one.rule == VariableReduction.FIRST
            else jnp.zeros_like(_contribute(one.rule, old[one.position], old[one.position], index))
            for one in self._changed
        )

    def reduce(self, before: Variables, sums: Tree, count: jax.Array) -> dict[str, Tree]:
        """Return the new collections from the sums of the contributions of `count` microbatches."""
        leaves = jax.tree.leaves(before.collections)
        for one, total in zip(self._changed, jax.tree.leaves(sums), strict=True):
            leaves[one.position] = _reduce(one.rule, leaves[one.position], total, count)
        return jax.tree.unflatten(self._treedef, leaves)

    def reduce_leaf(self, position: int, old: jax.Array, total: jax.Array, count: jax.Array) -> jax.Array:
        """Return the new value of one leaf of the collections, or of one layer of it; by its number among them."""
        (rule,) = (one.rule for one in self._changed if one.position == position)
        return _reduce(rule, old, total, count)

    def _unflatten(self, contributions: Any) -> Tree:  # noqa: ANN401 - an iterable of arrays
        leaves: list[Any] = [None] * self._treedef.num_leaves
        for one, contribution in zip(self._changed, contributions, strict=True):
            leaves[one.position] = contribution
        return jax.tree.unflatten(self._treedef, leaves)


def _contribute(rule: Rule, old: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    match rule:
        case VariableReduction.FIRST:
            # Zero from all others, so that the sum over microbatches is the first one's value.
            return jnp.where(index == 0, _to_number(new), 0)
        case VariableReduction.SUM:
            return widen(new) - widen(old)
        case _:
            return widen(new)


def _reduce(rule: Rule, old: jax.Array, total: jax.Array, count: jax.Array) -> jax.Array:
    match rule:
        case VariableReduction.FIRST:
            if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
                return jax.random.wrap_key_data(total, impl=jax.random.key_impl(old))
            return total.astype(old.dtype)
        case VariableReduction.SUM:
            return (widen(old) + total).astype(old.dtype)
        case VariableReduction.MEAN:
            return (total / count).astype(old.dtype)
        case _:
            assert callable(rule), "check_rules lets no other rule pass"
            return jnp.asarray(rule(old, total / count)).astype(old.dtype)


def widen(leaf: jax.Array) -> jax.Array:
    """Return an array in the dtype in which it is summed: float32 at least, integers as they are."""
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _to_number(leaf: jax.Array) -> jax.Array:
    """Return an array that can be added, with the same bits."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf


class _Leaf(NamedTuple):
    """A leaf of `Variables`: its collection or type, and its path in it.

    What a loss function assigns to parameters, which are in no collection, can only be discarded.
    """

    name: str
    path: str
    is_in_collection: bool

    @classmethod
    def of(cls, path: tuple[Any, ...]) -> "_Leaf":
        is_in_collection = path[0] == jax.tree_util.GetAttrKey("collections")
        name = path[1].key if is_in_collection else NNX_PARAMS
        return cls(name, jax.tree_util.keystr(path[2 if is_in_collection else 1 :]), is_in_collection)

    def __str__(self) -> str:
        return f"{self.name}{self.path}"


def _check_names(rules: Mapping[str, Rule], found: set[str]) -> None:
    unknown = sorted(set(rules) - found - set(DEFAULT_RULES))
    if unknown:
        raise CallerError(
            f"variable_reductions: found a rule for {', '.join(unknown)}, expected names of Linen collections or of "
            f"NNX types that the model has: {', '.join(sorted(found))}"
        )


def _check_changes(
    rules: Mapping[str, Rule], changed: list[_Leaf], old: Mapping[_Leaf, Any], new: Mapping[_Leaf, Any]
) -> None:
    """Check that each changed variable has a rule that suits it."""
    without = [leaf for leaf in changed if leaf.name not in rules]
    if without:
        names = ", ".join(f'"{name}": ...' for name in sorted({leaf.name for leaf in without}))
        raise CallerError(
            f"variable_reductions: found that the loss function changes {', '.join(map(str, without))}, expected a "
            "rule for what becomes of it in a step, which has several microbatches. Give "
            f"variable_reductions={{{names}}} with {EXPECTED_RULE}"
        )
    for leaf in changed:
        if rules[leaf.name] == VariableReduction.DISCARD:
            continue
        if not leaf.is_in_collection or leaf not in old:
            what = (
                "a trained parameter"
                if not leaf.is_in_collection
                else "a variable that the initial model lacks"
            )
            raise CallerError(
                f'variable_reductions: found {rules[leaf.name]!r} for {leaf}, expected "discard": it is {what}. Values '
                "that are only to be seen in the loss are taken out there, as by nnx.pop(model, nnx.Intermediate)"
            )
        if not _suits(rules[leaf.name], new[leaf].dtype):
            raise CallerError(
                f"variable_reductions: found {rules[leaf.name]!r} for {leaf} of dtype {new[leaf].dtype}, expected "
                '"first", or "sum" of integers, or "discard". Give the variable a type of its own with such a rule'
            )


def _suits(rule: Rule, dtype: Any) -> bool:  # noqa: ANN401 - any dtype
    if rule == VariableReduction.FIRST:
        return True
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    return is_inexact or (rule == VariableReduction.SUM and jnp.issubdtype(dtype, jnp.integer))


def find_sources(jaxpr: Any) -> list[Source]:  # noqa: ANN401 - closed or not
    """Return for each output of a jaxpr which of its arguments it is: a variable that the loss does not change.

    The identity of tracers does not tell: a variable that only passes through a `jit` or a `scan` comes back as
    another.

    >>> find_sources(jax.make_jaxpr(lambda a, b, c: (jax.jit(lambda x: (x, x + 1))(b), a))(1.0, 2.0, 3.0))
    [1, None, 0]
    """
    inputs = range(len(unwrap_jaxpr(jaxpr).invars))
    return walk(jaxpr, inputs, _find_result_sources, read_constant=lambda *_: None, enters=CALLS)


def _find_result_sources(equation: core.JaxprEqn, sources: tuple[Source, ...]) -> list[Source]:
    if equation.primitive.name != "scan":
        return [None] * len(equation.outvars)
    consts, carries = get_scan_arity(equation)
    # A carry is unchanged if it is returned in its own place; a stacked result if it is what is scanned over.
    return [
        sources[end]
        if end is not None and (end == consts + place if place < carries else end >= consts + carries)
        else None
        for place, end in enumerate(find_sources(get_body(equation)))
    ]
