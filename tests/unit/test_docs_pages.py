"""README and pages: links and pictures exist, names are public, the first example trains."""

import re
from itertools import chain
from pathlib import Path

import make_reference
import pytest
from draw_pictures import DESIGN, make_mark

import resilient_jax as rj

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PUBLIC_NAME = re.compile(r"(?<![\w.])rj\.([A-Za-z]\w*)")

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_readme_is_short() -> None:
    """A page that is read in five minutes: 150 lines, about 900 words of prose."""
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert len(FENCE.sub("", text).split()) <= 950


@by_page
def test_links_lead_to_files(page: Path) -> None:
    """Every relative link and picture exists."""
    targets = [
        link.split("#")[0] for link in LINK.findall(FENCE.sub("", page.read_text())) if "://" not in link
    ]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@by_page
def test_names_are_public(page: Path) -> None:
    """Every `rj.` name in prose and code exists."""
    assert set(PUBLIC_NAME.findall(page.read_text())) <= set(rj.__all__)


@by_page
def test_code_compiles(page: Path) -> None:
    """Every block of Python can be parsed."""
    for number, block in enumerate(PYTHON.findall(page.read_text())):
        compile(block, f"{page.name}, block {number}", "exec")


def test_each_picture_is_drawn_from_its_source() -> None:
    """Otherwise: python docs/draw_pictures.py (needs graphviz)."""
    sources = sorted(DESIGN.glob("*.dot"))
    assert [source.stem for source in sources] == sorted(picture.stem for picture in DESIGN.glob("*.svg"))
    assert [s.stem for s in sources if make_mark(s) not in s.with_suffix(".svg").read_text()] == []


def test_each_picture_is_on_a_page() -> None:
    """A picture on no page is dead."""
    linked = set(chain.from_iterable(LINK.findall(page.read_text()) for page in PAGES))
    names = {link.rsplit("/", 1)[-1] for link in linked}
    assert {picture.name for picture in DESIGN.glob("*.svg")} <= names


def test_first_example_of_the_readme_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """On one host, as `python train.py`."""
    example = PYTHON.findall(README.read_text())[0]
    exec(compile(example, str(README), "exec"), {"__name__": "__main__"})
    assert float(capsys.readouterr().out.split()[-1]) < 0.1


@pytest.mark.parametrize("name", make_reference.PAGES)
def test_reference_is_what_the_code_says(name: str) -> None:
    """Otherwise: python docs/make_reference.py."""
    written = (make_reference.REFERENCE / name).read_text()
    assert written == make_reference.MARK + make_reference.PAGES[name]()
    assert written.count("\n| `" if name == "configuration.md" else "\n| ") > 10


def test_every_page_is_in_the_index() -> None:
    """A page that no table of contents has is a warning of `make docs`."""
    listed = (ROOT / "docs" / "index.md").read_text().splitlines()
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in PAGES if page != README]
    assert [str(page) for page in pages if str(page) not in listed] == ["index"]
