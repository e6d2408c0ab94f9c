"""Keeps lowered programs when a world is left, as `distributed` keeps traces.

JAX lowers a traced function to a module for the compiler, whose digest is the key of the persistent cache. It drops
modules with the backend; but a module refers to no device: of shardings it has only what is in `HloSharding`, whose
tiles are numbered 0, 1, 2, ... So in the next world a program of the same shapes and shardings is loaded without being
lowered again, which is Python, under its global lock: half a second of a host's first step after a re-form, for a
transformer of eight layers.

What may refer to the process or its devices is lowered anew: callbacks, ordered effects, primitives that ask for the
devices while they are lowered.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeAlias

from jax._src import config, sharding_impls
from jax._src.interpreters import mlir

Untyped: TypeAlias = Any
"""An object of JAX's that has no usable type."""

EXPECTED_PARAMETERS: Final = (
    "module_name",
    "jaxpr",
    "num_const_args",
    "in_avals",
    "ordered_effects",
    "platforms",
    "backend",
    "axis_context",
    "donated_args",
    "replicated_args",
    "arg_shardings",
    "result_shardings",
    "in_layouts",
    "out_layouts",
    "arg_names",
    "result_names",
    "num_partitions",
    "all_default_mem_kind",
    "input_output_aliases",
    "propagated_out_mem_kinds",
    "lowering_parameters",
)
"""Parameters of the function of JAX that is replaced: with one more, a key might not tell two modules apart."""
OUT_AVALS: Final = "out_avals"
"""A parameter that this function has since jax 0.12.0.1, where a jaxpr has no constants."""
MAX_MODULES: Final = 8
"""Modules kept of one trace: it is lowered again for other shardings, as a shrinking world of each size has them."""


class LoweringCache:
    """Calls JAX's function that lowers, unless it has the module of an equal call.

    Args:
        original: `mlir.lower_jaxpr_to_module`.
    """

    def __init__(self, original: Callable[..., Untyped]) -> None:
        self._original = original
        self._lock = threading.Lock()
        self._modules: weakref.WeakKeyDictionary[Untyped, dict[Hashable, Untyped]] = (
            weakref.WeakKeyDictionary()
        )
        """Lowered modules by trace and key. Entries go with their trace. Guarded by the lock."""

    def __call__(self, module_name: str, jaxpr: Untyped, **arguments: Untyped) -> Untyped:
        """Return what JAX's function returns."""
        key = _make_key(module_name, jaxpr, arguments)
        if key is not None:
            with self._lock:
                found = self._modules.get(jaxpr, {}).get(key)
            if found is not None:
                return found
        found = self._original(module_name, jaxpr, **arguments)
        if key is not None and not found.keepalive and not found.host_callbacks:
            with self._lock:
                modules = self._modules.setdefault(jaxpr, {})
                if len(modules) >= MAX_MODULES:
                    del modules[next(iter(modules))]
                modules[key] = found
        return found


def keep_lowerings() -> str | None:
    """Make JAX use modules of earlier worlds again; once per process.

    Returns:
        None when it does; else why not.
    """
    if isinstance(mlir.lower_jaxpr_to_module, LoweringCache):
        return None
    found = tuple(inspect.signature(mlir.lower_jaxpr_to_module).parameters)
    if tuple(name for name in found if name != OUT_AVALS) != EXPECTED_PARAMETERS:
        return (
            f"lower_jaxpr_to_module of this jax takes {found}, expected {EXPECTED_PARAMETERS}; re-forming lowers "
            "programs again"
        )
    setattr(mlir, "lower_jaxpr_to_module", LoweringCache(mlir.lower_jaxpr_to_module))  # noqa: B010 - final, says its type
    return None


def _make_key(module_name: str, jaxpr: Untyped, arguments: dict[str, Untyped]) -> Hashable | None:
    """Return what the module depends on, without devices; None: it may depend on more."""
    rest = dict(arguments)
    context, backend = rest.pop("axis_context"), rest.pop("backend")
    is_known = isinstance(context, sharding_impls.ShardingContext) and context.device_assignment is None
    if not is_known or rest.pop("ordered_effects") or backend is None:
        return None
    out_avals = jaxpr.out_avals if rest.get(OUT_AVALS) is None else rest[OUT_AVALS]
    shardings = tuple(
        _describe_shardings(rest.pop(name), avals)
        for name, avals in (("arg_shardings", rest["in_avals"]), ("result_shardings", out_avals))
    )
    # What the user's settings change, such as the precision of products, is in the context.
    key = (
        module_name,
        backend.platform,
        context,
        shardings,
        config.trace_context(),
        tuple(
            (name, tuple(value) if isinstance(value, list) else value) for name, value in sorted(rest.items())
        ),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _describe_shardings(shardings: Sequence[Untyped] | None, avals: Sequence[Untyped]) -> Hashable:
    """Return what JAX compares of shardings to use a module for other devices (`pxla.SemanticallyEqualShardings`)."""
    return shardings and tuple(
        one and (one._to_xla_hlo_sharding(aval.ndim), one.memory_kind)
        for one, aval in zip(shardings, avals, strict=True)
    )
