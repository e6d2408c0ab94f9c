"""The words of the hand-written pages: few, and in short sentences, by rule 5 of the house's rules for words."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *(DOCS / "design").glob("*.md")])
"""What hands write: `docs/reference` is made from the code."""
MAX_WORDS = 20_000
"""Without code."""
MAX_SENTENCE_WORDS = 25

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WORD = re.compile(r"\S*[^\W\d_]\S*")
"""What has a letter: no figure, and no bar of a table."""
NO_PROSE = re.compile(r"^(?:\||#|!\[|\.\. |:).*$", re.MULTILINE)
PARAGRAPH_END = re.compile(r"\n\s*\n|(?:^|\n) {0,3}(?:[-*]|\d+\.) ")
"""Between paragraphs, and before an item of a list, with its mark."""
SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<! al)[.!?][)*_\"]*(?=\s+[^a-z\s])")


def list_sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a page, without code, tables and headings; each item of a list ends one."""
    text = NO_PROSE.sub("\n", FENCE.sub("\n", page))
    for paragraph in PARAGRAPH_END.split(text):
        if not paragraph.startswith("    "):
            yield from (" ".join(sentence.split()) for sentence in SENTENCE_END.split(paragraph))


def find_long_sentences(page: str) -> list[str]:
    """Return the sentences of a page that have too many words."""
    return [sentence for sentence in list_sentences(page) if len(sentence.split()) > MAX_SENTENCE_WORDS]


def test_the_pages_are_few_words() -> None:
    """A fact stands on one page, and others link to it. A figure stands in a table, history in the commits."""
    words = {page.name: len(WORD.findall(FENCE.sub("", page.read_text("utf-8")))) for page in PAGES}
    assert sum(words.values()) <= MAX_WORDS, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_sentence_has_one_condition(page: Path) -> None:
    """What needs more words than these is two sentences, or the rows of a table."""
    assert find_long_sentences(page.read_text("utf-8")) == []


def test_a_long_sentence_is_found() -> None:
    """In prose and in the items of a list, across lines; not in code, tables and headings."""
    long = " ".join(["word"] * (MAX_SENTENCE_WORDS + 1))
    short = " ".join(["word"] * MAX_SENTENCE_WORDS)
    found = (f"{long}.", f"- {long}", long.replace(" ", "\n"), f"Short. {long}: yes.")
    assert all(find_long_sentences(page) for page in found)
    allowed = (
        f"{short}. {short.title()}.",
        f"- {short}\n- {short}",
        f"| {long} |",
        f"# {long}",
        f"    {long}",
    )
    fence = f"```python\n{long}\n\n{long}\n```"
    assert [page for page in (*allowed, fence) if find_long_sentences(page)] == []
