"""A line about an argument, a field or an error says what its name and type do not, as a phrase with its noun.

Whatever a reader knows from the signature is left out, with the heading where nothing remains. Only the public API has
lines for all arguments, since `docs/api.md` and `docs/reference` are made from them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import resilient_jax

ROOT = Path(resilient_jax.__file__).parent
DEFINITION = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SECTION = re.compile(r"^(Args|Attributes|Raises):\n((?: {4}.*\n?)+)", re.MULTILINE)
LINE = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", re.MULTILINE)
NO_NOUN = re.compile(
    r"(of|that|whose|(at|by|in|to) which|it|its|they|their|them|those|these|this one|another one)\b", re.I
)
"""How a description begins whose noun is somewhere else."""
FUNCTION_WORD = re.compile(
    r"a|all|an|and|another|any|are|as|at|be|been|by|each|every|for|from|given|had|has|have|how|if|in|"
    r"is|it|its|itself|long|many|much|no|not|of|often|on|one|or|other|own|same|see|so|some|such|than|"
    r"that|the|their|them|then|there|these|they|this|those|to|was|were|what|when|where|which|who|"
    r"whose|why|with"
)
"""A word that says nothing of what an argument is."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def list_words(text: str) -> set[str]:
    """Return the words of a text or of identifiers but function words, without a plural's end."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", text)
    words = re.findall(r"[a-z0-9]+", spaced.lower())
    return {word.rstrip("s") for word in words if not FUNCTION_WORD.fullmatch(word)}


def list_types(definition: Definition) -> dict[str, str]:
    """Return the annotation of each argument of a function, or of each field and constructor argument of a class."""
    if not isinstance(definition, ast.ClassDef):
        every = (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs)
        return {argument.arg: ast.unparse(argument.annotation) for argument in every if argument.annotation}
    types: dict[str, str] = {}
    for child in definition.body:
        match child:
            case ast.FunctionDef(name="__init__"):
                types |= list_types(child)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                types[name] = ast.unparse(annotation)
    return types


def find_offences(tree: ast.Module) -> Iterator[str]:
    """Yield each line that has no noun, or no word beyond function words, its name and its type."""
    for definition in (node for node in ast.walk(tree) if isinstance(node, DEFINITION)):
        types = list_types(definition)
        for section, lines in SECTION.findall(ast.get_docstring(definition) or ""):
            for name, description in LINE.findall(lines):
                known = list_words(name) | list_words(types.get(name, ""))
                if NO_NOUN.match(description) or (section != "Raises" and list_words(description) <= known):
                    yield f"{definition.name}, {name}: {description}"


def test_argument_lines_say_what_name_and_type_do_not() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {offence}"
        for path in sorted(ROOT.rglob("*.py"))
        for offence in find_offences(ast.parse(path.read_text("utf-8")))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("host: this one.", True),
        ("host: the host.", True),
        ("host: of the worker.", True),
        ("host: its name.", True),
        ("host: name of the host.", True),
        ("host: host of the worker.", False),
        ("host: None: all hosts of the job.", False),
        ("step: which.", True),
        ("step: number of committed steps.", False),
    ],
)
def test_a_line_that_says_nothing_is_found(line: str, is_found: bool) -> None:
    code = f'def f(host: HostName, step: int) -> None:\n    """Do it.\n\n    Args:\n        {line}\n    """\n'
    assert bool(list(find_offences(ast.parse(code)))) is is_found
