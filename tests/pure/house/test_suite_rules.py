"""The rules of the suite, that `tests/README.md` lists: what no test may do."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.durations import read_durations
from tests.support.paths import ROOT, TESTS
from tests.support.patience import NEVER_S, patience, slowness
from tests.support.properties import FULL, QUICK
from tests.support.tiers import TIERS, find_tier

CLOCKS = frozenset({"monotonic", "perf_counter", "time"})
WAITS = frozenset({"wait", "join", "result", "communicate", "timeout", "wait_for", "run", "check_output"})
"""Functions whose first argument, or `timeout`, is how long they wait."""
FIRST_IS_A_TIMEOUT = frozenset({"wait", "join", "result", "timeout"})
LAST_IS_A_TIMEOUT = frozenset(
    {"wait_until", "wait_event", "wait_report", "wait_held", "wait_said", "wait_for"}
)
LONGEST_LITERAL_S = 1.0
"""A shorter wait shows that something does not happen; what is waited for gets `patience`."""

SOURCES = {
    path: ast.parse(path.read_text())
    for path in sorted(TESTS.rglob("*.py"))
    if find_tier(path) is not None or path.is_relative_to(TESTS / "support")
}


def list_found(rule) -> list[str]:
    """Return where a rule finds something, as path:line."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:100]}"
        for path, tree in SOURCES.items()
        for node in rule(tree)
    ]


def is_clock(node: ast.expr) -> bool:
    """Return whether this reads a clock of the machine."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS):
        return False
    return isinstance(node.func.value, ast.Name) and node.func.value.id == "time"


def bounds_time_from_above(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield comparisons in assertions that only a fast machine passes: `assert time.monotonic() - began_s < 5.0`."""
    for asserted in (node for node in ast.walk(tree) if isinstance(node, ast.Assert)):
        for found in (node for node in ast.walk(asserted.test) if isinstance(node, ast.Compare)):
            sides = [found.left, *found.comparators]
            for left, operator, right in zip(sides, found.ops, sides[1:], strict=False):
                smaller = left if isinstance(operator, ast.Lt | ast.LtE) else right
                is_ordered = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
                if is_ordered and (
                    is_clock(smaller) or (isinstance(smaller, ast.BinOp) and is_clock(smaller.left))
                ):
                    yield found


def list_constants(tree: ast.Module) -> dict[str, float]:
    """Return the numbers that a module gives names to."""
    return {
        target.id: float(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int | float)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def read_number(node: ast.expr) -> float | None:
    """Return the number that an expression writes out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    return None


def waits_for_a_fixed_time(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield waits whose end is a number of the test's own, and not `patience`."""
    constants = list_constants(tree)

    def is_fixed(node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return LONGEST_LITERAL_S < constants.get(node.id, 0.0) < NEVER_S / 10
        seconds = read_number(node)
        return seconds is not None and LONGEST_LITERAL_S < seconds < NEVER_S / 10

    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            if is_clock(node.left) and is_fixed(node.right):
                yield node
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = (
                [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
                if name in WAITS
                else []
            )
            if name in LAST_IS_A_TIMEOUT:
                given += [keyword.value for keyword in node.keywords if keyword.arg == "timeout_s"]
            given += node.args[:1] if name in FIRST_IS_A_TIMEOUT else []
            given += node.args[1:][-1:] if name in LAST_IS_A_TIMEOUT else []
            if any(map(is_fixed, given)):
                yield node


def sleeps_long(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield sleeps that hope that something has happened by their end."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep":
            (duration,) = node.args
            seconds = read_number(duration)
            if seconds is not None and seconds > LONGEST_LITERAL_S:
                yield node


def has_a_number_of_examples(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield settings of properties that override the profiles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "settings":
            names = {keyword.arg for keyword in node.keywords}
            if names & {"max_examples", "derandomize"}:
                yield node


def has_a_timeout_of_its_own(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield marks with a time-out; the tier's is in force."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "timeout"
            and ast.unparse(node.value).endswith("mark")
        ):
            yield node


RULES = {
    "no upper bound on time": bounds_time_from_above,
    "patience is the only source of deadlines": waits_for_a_fixed_time,
    "no sleep in place of a wait": sleeps_long,
    "profiles say how many examples": has_a_number_of_examples,
    "tiers say how long a test may take": has_a_timeout_of_its_own,
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_no_test_breaks_a_rule(rule) -> None:
    allowed = {TESTS / "support" / name for name in ("patience.py", "properties.py")}
    found = [place for place in list_found(rule) if ROOT / place.partition(":")[0] not in allowed]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("no upper bound on time", "assert time.monotonic() - began_s < 5.0"),
        ("no upper bound on time", "assert 0.5 < time.monotonic() - began_s < LONG_S, 'late'"),
        ("no upper bound on time", "assert LONG_S > time.perf_counter() - began_s"),
        ("no upper bound on time", "assert time.monotonic() < end_s"),
        ("patience is the only source of deadlines", "end_s = time.monotonic() + 30"),
        ("patience is the only source of deadlines", "LONG_S = 20\nprocess.wait(timeout=LONG_S)"),
        ("patience is the only source of deadlines", "thread.join(10.0)"),
        ("patience is the only source of deadlines", "asyncio.timeout(5)"),
        ("patience is the only source of deadlines", "asyncio.wait_for(end, 30)"),
        ("patience is the only source of deadlines", "wait_until('it ends', has_ended, 10.0)"),
        ("patience is the only source of deadlines", "job.wait_event('it ends', is_end, timeout_s=10.0)"),
        ("no sleep in place of a wait", "time.sleep(3)"),
        ("profiles say how many examples", "settings(max_examples=500)"),
        ("tiers say how long a test may take", "pytestmark = pytest.mark.timeout(30)"),
    ],
)
def test_a_rule_finds_what_it_is_for(rule: str, code: str) -> None:
    assert list(RULES[rule](ast.parse(code)))


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("no upper bound on time", "assert time.monotonic() - began_s >= 0.5"),
        ("no upper bound on time", "while time.monotonic() < end_s: pass"),
        ("patience is the only source of deadlines", "thread.join(patience(1))"),
        ("patience is the only source of deadlines", "done.wait(0.3)"),
        ("no sleep in place of a wait", "time.sleep(0.02)"),
    ],
)
def test_a_rule_leaves_alone_what_is_right(rule: str, code: str) -> None:
    assert not list(RULES[rule](ast.parse(code)))


def test_every_test_is_in_a_tier() -> None:
    lost = [path for path in TESTS.rglob("test_*.py") if find_tier(path) is None]
    assert not lost
    folders = {
        path.name for path in TESTS.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))
    }
    assert folders == {tier.name.partition("/")[0] for tier in TIERS} | {
        "support",
        "fuzz",
        "chaos",
        "conformance",
        "gpu",
    }


def test_known_durations_are_of_tests_that_exist() -> None:
    assert [name for name in read_durations() if not (ROOT / name).exists()] == []


def test_properties_draw_the_same_examples_in_each_run_but_in_full() -> None:
    quick, full = settings.get_profile(QUICK), settings.get_profile(FULL)
    assert (quick.derandomize, quick.max_examples) == (True, 10)
    assert (full.derandomize, full.max_examples) == (False, 300)
    assert quick.deadline is full.deadline is None


def test_a_slower_machine_gets_more_time() -> None:
    assert patience(2.0) == 20.0 * slowness()
    assert slowness() >= 1.0


def test_the_pure_tier_loads_no_jax_and_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook that holds it is seen to refuse both here."""
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    with pytest.raises(ImportError, match="imports no JAX"):
        importlib.import_module("jax")
    with pytest.raises(RuntimeError, match="starts no process"):
        subprocess.run([sys.executable, "-c", "pass"], check=False)


def list_supports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of support that a file imports."""
    for node in ast.walk(tree):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and module == "tests.support":
            yield from (alias.name for alias in node.names)
        elif module.startswith("tests.support."):
            yield module.split(".")[2]


def test_support_is_what_several_folders_use() -> None:
    """What tests of one folder use stands beside them."""
    names = [path.stem for path in (TESTS / "support").glob("*.py")]
    users: dict[str, set[str]] = {name: set() for name in names}
    for path in TESTS.rglob("*.py"):
        for name in list_supports(ast.parse(path.read_text())):
            if name in users:  # else a folder of support, such as that of the scripts
                users[name].add(path.parent.relative_to(TESTS).as_posix())
    lonely = {
        name: where for name, where in users.items() if len(where) < 2 and where.isdisjoint({".", "support"})
    }
    assert not lonely
