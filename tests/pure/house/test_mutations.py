"""Each mutation changes code that is there: one whose text has moved would test nothing."""

import dataclasses
from pathlib import Path

import pytest

import resilient_jax
from tests.mutations import AREAS, MUTATIONS, Mutation
from tests.support.paths import ROOT

PACKAGE = Path(resilient_jax.__file__).parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.area}: {mutation.means}")
def test_what_a_mutation_changes_stands_once_in_its_file(mutation: Mutation) -> None:
    assert (PACKAGE / mutation.file).read_text().count(mutation.right) == 1
    assert mutation.wrong != mutation.right


def test_no_two_mutations_are_the_same_and_each_has_tests() -> None:
    assert len({dataclasses.astuple(mutation) for mutation in MUTATIONS}) == len(MUTATIONS)
    assert {mutation.area for mutation in MUTATIONS} == AREAS.keys()
    missing = [path for paths in AREAS.values() for path in paths if not (ROOT / path).exists()]
    assert not missing
