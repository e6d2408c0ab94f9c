"""The rules of the membership, as texts: `scenarios/*.txt`, in the language of `scenario_language`."""

import difflib
import itertools
import re
from pathlib import Path

import pytest

from resilient_jax.membership.phases import PHASE_MOVES
from tests.pure.membership.scenario_language import (
    Scenario,
    format_scenarios,
    list_files,
    parse_scenarios,
    play_scenarios,
)

FOLDER = Path(__file__).parent / "scenarios"


def read(path: Path) -> list[Scenario]:
    return parse_scenarios(path.read_text())[1]


CASES = [(path, number) for path in list_files(FOLDER) for number in range(len(read(path)))]


def name_case(case: tuple[Path, int]) -> str:
    path, number = case
    return f"{path.stem}: {read(path)[number].title}"


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_the_leader_does_what_the_scenario_says(case: tuple[Path, int], pytestconfig: pytest.Config) -> None:
    path, number = case
    if pytestconfig.getoption("--rewrite") and number == 0:
        head, scenarios = parse_scenarios(path.read_text())
        path.write_text(format_scenarios(head, play_scenarios(scenarios)))
    scenarios = read(path)
    expected = scenarios[number]
    played = expected.play({one.title: one for one in scenarios if one.is_beginning})
    if played != expected:
        lines = difflib.unified_diff(
            expected.format().splitlines(), played.format().splitlines(), "expected", "found", lineterm=""
        )
        pytest.fail("\n".join(["the leader does something else:", *lines]), pytrace=False)


@pytest.mark.parametrize("path", list_files(FOLDER), ids=lambda path: path.stem)
def test_a_file_is_written_as_rewrite_would_write_it(path: Path) -> None:
    head, scenarios = parse_scenarios(path.read_text())
    assert format_scenarios(head, scenarios) == path.read_text()
    titles = [scenario.title for scenario in scenarios]
    assert len(set(titles)) == len(titles)


def test_each_phase_follows_another_as_the_table_says_and_each_row_of_it_happens() -> None:
    happened = set()
    for path in list_files(FOLDER):
        for scenario in re.split(r"^(?:===|---) ", path.read_text(), flags=re.MULTILINE):
            written = re.findall(r"^ +generation (\d+) (\w+)", scenario, re.MULTILINE)
            for (number, phase), (next_number, next_phase) in itertools.pairwise(written):
                steps = int(next_number) - int(number)
                if (steps, phase) != (0, next_phase):
                    happened.add((phase, next_phase, steps))
    assert happened == {(move.before, move.after, int(move.opens_number)) for move in PHASE_MOVES}
