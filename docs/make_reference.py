"""Writes docs/reference from docstrings: the public names, the keys of the configuration, and the exit codes.

    python docs/make_reference.py

A test compares the pages with what this would write.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import resilient_jax as rj
from resilient_jax.config.job_config import JobConfig
from resilient_jax.errors import ExitCode

REFERENCE = Path(__file__).parent / "reference"
MARK = "% Written by docs/make_reference.py.\n\n"


def list_documented_values(documented: type) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value as in the code, docstring on one line) of each assignment in a class."""
    (definition,) = ast.parse(inspect.getsource(documented)).body
    assert isinstance(definition, ast.ClassDef)
    for index, statement in enumerate(definition.body):
        match statement:
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                | ast.Assign(targets=[ast.Name(id=name)], value=value)
            ):
                yield name, ast.unparse(value), _find_docstring(definition.body[index + 1 :])


def _find_docstring(rest: list[ast.stmt]) -> str:
    match rest:
        case [ast.Expr(value=ast.Constant(value=str() as text)), *_]:
            return " ".join(text.split())
    return ""


def make_configuration() -> str:
    """Return the page of the configuration's keys."""
    rows = [f"| `{name}` | `{value}` | {text} |" for name, value, text in list_documented_values(JobConfig)]
    intro = "What `--config job.toml` sets, with defaults. Every agent of a job must have the same values."
    return "\n".join(
        [f"# Configuration\n\n{intro}\n", "| key | default | meaning |", "|---|---|---|", *rows, ""]
    )


def make_exit_codes() -> str:
    """Return the page of the exit codes."""
    rows = [f"| {value} | `{name}` | {text} |" for name, value, text in list_documented_values(ExitCode)]
    intro = "What `resilient-jax agent` and `launch` exit with. What to do about each: [failures](../failures.md)."
    return "\n".join([f"# Exit codes\n\n{intro}\n", "| code | name | meaning |", "|---|---|---|", *rows, ""])


def make_public_names() -> str:
    """Return the page of the names of `rj`, each with the first sentence of its docstring."""
    rows = [
        f"| `rj.{name}` | {_find_summary(getattr(rj, name))} |" for name in sorted(rj.__all__, key=str.lower)
    ]
    intro = (
        "What `import resilient_jax as rj` offers. `help(rj.Trainer)` has arguments, errors and an example."
    )
    return "\n".join(
        [f"# Public names\n\n{intro}\n", "| name | what it is or does |", "|---|---|", *rows, ""]
    )


def _find_summary(documented: object) -> str:
    return (inspect.getdoc(documented) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


PAGES = {
    "public_names.md": make_public_names,
    "configuration.md": make_configuration,
    "exit_codes.md": make_exit_codes,
}


def main() -> None:
    """Write every page."""
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(MARK + make())


if __name__ == "__main__":
    main()
