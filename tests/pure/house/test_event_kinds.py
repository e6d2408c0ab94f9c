"""The docstrings of `EventKind` name what the code records."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from make_reference import list_documented_values, split_detail

import resilient_jax
from resilient_jax.events import EventKind

NAME = re.compile(r"`(\w+)`")
VALUES = {"shrink", "grow", "reform"}
"""Values of details, not their names."""
WITHOUT_KEYWORDS = {
    "CHECKPOINT_RESTORED",
    "GENERATION_STALE",  # recorded by workers and by agents, with other details
    "LOG_UNWRITABLE",
    "PROGRAMS_READY",
    "PROGRAM_FAILED",  # when it is compiled ahead, and when it is fetched
    "REQUEST_MALFORMED",
    "REQUEST_UNAUTHENTICATED",
    "SNAPSHOT_COMMITTED",
    "SNAPSHOT_COMPLETE",
}
"""Kinds that are recorded with a mapping or in several ways: no call has all of their details as keywords."""


def list_recorded() -> Iterator[tuple[str, frozenset[str]]]:
    """Yield (name of the kind, details) of each call that records an event by its name."""
    for path in Path(resilient_jax.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="record" | "record_event" | "_record_event" | "_note")
                    | ast.Name(id="record_event" | "note"),
                    args=[ast.Attribute(value=ast.Name(id="EventKind"), attr=kind), *_],
                    keywords=keywords,
                ):
                    yield kind, frozenset(k.arg for k in keywords if k.arg) - {"generation", "step"}
                case _:
                    pass


def list_documented() -> dict[str, frozenset[str]]:
    """Return the details that the docstring of each kind names."""
    return {
        kind: frozenset(NAME.findall(split_detail(text)[1])) - VALUES
        for kind, _, text in list_documented_values(EventKind)
    }


def test_each_kind_is_described() -> None:
    """A sentence: what happened."""
    described = {kind: split_detail(text)[0] for kind, _, text in list_documented_values(EventKind)}
    assert list(described) == [kind.name for kind in EventKind]
    assert [kind for kind, text in described.items() if not text.endswith(".")] == []


def test_details_are_those_that_are_recorded() -> None:
    """Otherwise: change the docstring of the kind, then python docs/make_reference.py."""
    documented, recorded = list_documented(), set(list_recorded())
    different = {
        (kind, found)
        for kind, found in recorded
        if (kind not in WITHOUT_KEYWORDS and found != documented[kind]) or not found <= documented[kind]
    }
    assert different == set()
    assert {kind.name for kind in EventKind} - {kind for kind, _ in recorded} <= WITHOUT_KEYWORDS
