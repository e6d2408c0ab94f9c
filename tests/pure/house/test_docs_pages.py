"""README and pages: links and pictures exist, names and options too, the first example trains."""

import functools
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import typer
from draw_pictures import DESIGN, make_mark
from make_reference import list_public_names

from resilient_jax.cli.main import COMMANDS, build_app
from tests.support.paths import ROOT

README = ROOT / "README.md"
# `make docs` builds into docs/_build, which holds a copy of every page.
PAGES = [README, *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
PACKAGE_READMES = [
    path
    for folder in ("resilient_jax", "tests", "examples", "meshes", "configs")
    for path in sorted((ROOT / folder).rglob("README.md"))
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PUBLIC_NAME = re.compile(r"(?<![\w.])rj\.((?:(?:data|planning)\.)?[A-Za-z]\w*)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
AUTODOC = re.compile(
    r"^\.\. auto(?:class|function|exception|data):: (?:[\w.]+\.)?(\w+)(?:\(\))?$", re.MULTILINE
)
COMMAND = re.compile(r"(?:resilient-jax |`(?!resilient-jax ))([a-z]+)\b(?![\w.(])([^`\n]*)")
OPTION = re.compile(r"(?<!\S)(--?[a-z][\w-]*)")

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
by_document = pytest.mark.parametrize(
    "page", [*PAGES, *PACKAGE_READMES], ids=lambda page: str(page.relative_to(ROOT))
)


def list_links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, anchor) of each relative link of a page; one of them may be empty."""
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" not in link:
            target, _, anchor = link.partition("#")
            yield target, anchor


def list_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MyST give to the headings of a page."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@functools.cache
def list_options() -> dict[str, set[str]]:
    """Return the options of each command of `resilient-jax`."""
    commands = typer.main.get_command(build_app(COMMANDS)).commands  # pyright: ignore[reportAttributeAccessIssue]
    return {
        name: {"--help", *chain.from_iterable(p.opts + p.secondary_opts for p in command.params)}
        for name, command in commands.items()
    }


def list_unknown_options(text: str) -> list[str]:
    """Return "COMMAND --option" for what a text says of `resilient-jax`, and what does not exist."""
    unknown: list[str] = []
    for match in COMMAND.finditer(text.replace("\\\n", " ")):
        name, rest = match.groups()
        if name not in COMMANDS:
            unknown += [name] if match[0].startswith("resilient-jax ") else []
            continue
        own = re.split(r"\S+\.py\b| -- |SCRIPT|#|\|", rest)[0]  # what follows a script is the script's
        unknown += [
            f"{name} {option}" for option in OPTION.findall(own) if option not in list_options()[name]
        ]
    return unknown


def test_readme_is_short() -> None:
    """A page that is read in five minutes: 150 lines, about 900 words of prose."""
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert len(FENCE.sub("", text).split()) <= 950


@by_document
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Every relative link and picture exists, and so does the heading that it names."""
    for target, anchor in list_links(page):
        found = page.parent / target if target else page
        assert found.exists(), target
        assert not anchor or anchor in list_anchors(found), f"{target}#{anchor}"


@by_page
def test_names_are_public(page: Path) -> None:
    """Every `rj.` name in prose and code exists."""
    assert set(PUBLIC_NAME.findall(page.read_text())) <= {*list_public_names(), "data", "planning"}


@by_document
def test_commands_and_options_exist(page: Path) -> None:
    """Every `resilient-jax COMMAND --option` in prose and code exists."""
    assert list_unknown_options(page.read_text()) == []


def test_an_unknown_option_is_found() -> None:
    """The check above sees commands in code, in prose, and on continued lines; a script's options are its own."""
    assert list_unknown_options("    resilient-jax launch --host 4 train.py --lr 1") == ["launch --host"]
    assert list_unknown_options("`agent --tls DIR --tsl`, `status --json`") == ["agent --tsl"]
    assert list_unknown_options("$ resilient-jax agent --job lm \\\n  --hosts 3 train.py") == [
        "agent --hosts"
    ]
    assert list_unknown_options("`resilient-jax bench step`") == ["bench"]


def test_the_own_loop_page_begins_with_no_array_before_run() -> None:
    """JAX's devices come with the world, so this is the first trap of a loop of one's own."""
    _, first = (ROOT / "docs" / "own_loop.md").read_text().split("\n\n")[:2]
    assert "no array before `rj.run`" in first.split(".\n")[0].split(". ")[0].split(":")[0]


def test_each_public_name_is_in_the_api_reference_once() -> None:
    """Sphinx takes its docstring from there."""
    documented = AUTODOC.findall((ROOT / "docs" / "api.md").read_text())
    assert sorted(documented) == sorted(name.rpartition(".")[2] for name in list_public_names())


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


@pytest.mark.parametrize("picture", sorted(DESIGN.glob("*.dot")), ids=lambda picture: picture.stem)
def test_the_numbers_in_a_picture_are_items_of_its_page(picture: Path) -> None:
    """A reader finds what a box means under its number."""
    numbers = set(re.findall(r'label="\s*(\d+)[a-z]? ', picture.read_text()))
    if not numbers:
        return  # no walk
    assert numbers == set(re.findall(r"^(\d+)\. ", picture.with_suffix(".md").read_text(), re.MULTILINE))


def test_each_picture_is_on_a_page() -> None:
    """A picture on no page is dead."""
    linked = set(chain.from_iterable(LINK.findall(page.read_text()) for page in PAGES))
    names = {link.rsplit("/", 1)[-1] for link in linked}
    assert {picture.name for picture in DESIGN.glob("*.svg")} <= names


def test_every_page_is_in_the_index() -> None:
    """A page that no table of contents has is a warning of `make docs`."""
    listed = (ROOT / "docs" / "index.md").read_text().splitlines()
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in PAGES if page != README]
    assert [str(page) for page in pages if str(page) not in listed] == ["index"]
