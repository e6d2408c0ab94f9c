"""What the documentation shows runs, and what it lists is there."""

import ast
import re

import make_reference
import pytest

from tests.support.paths import ROOT

README = ROOT / "README.md"


PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_first_example_of_the_readme_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """On one host, as `python train.py`."""
    example = PYTHON.findall(README.read_text())[0].replace("num_steps=2_000", "num_steps=100")
    exec(compile(example, str(README), "exec"), {"__name__": "__main__"})
    metrics = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert metrics["loss"] < 0.1


@pytest.mark.parametrize("name", make_reference.PAGES)
def test_reference_is_what_the_code_says(name: str) -> None:
    """Otherwise: python docs/make_reference.py."""
    written = (make_reference.REFERENCE / name).read_text()
    assert written == make_reference.MARK + make_reference.PAGES[name]()
    assert written.count("\n| ") > 10
    if name != "events.md":  # some events have no detail
        assert [line for line in written.splitlines() if line.endswith("|  |")] == [], (
            "a docstring is missing"
        )
