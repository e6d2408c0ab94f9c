"""Writes docs/reference from the code: a page for each of `PAGES`.

    python docs/make_reference.py

A test compares the pages with what this would write.
"""

import ast
import enum
import importlib
import inspect
import operator
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import typer

import resilient_jax as rj
from resilient_jax.cli.main import COMMANDS, build_app
from resilient_jax.cluster import generation_orders, standby_orders
from resilient_jax.cluster.job_report import JobReport
from resilient_jax.cluster.run_directory import EndedJob
from resilient_jax.config.job_config import JobConfig
from resilient_jax.errors import CallerError, ExitCode, OperatorError, PeerError, ResilientJaxError
from resilient_jax.events import EventKind
from resilient_jax.lazy_names import read_homes
from resilient_jax.membership.phases import PHASE_MOVES
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import GenerationPhase
from resilient_jax.worker.protocol_table import ALIVE, ORDER_EFFECTS, WORKER_MOVES

REFERENCE = Path(__file__).parent / "reference"
GROUPS = ("data", "planning")
"""The packages in `rj` that are public."""
MARK = "% Written by docs/make_reference.py.\n\n"
ERROR_MODULES = ("resilient_jax.errors", "resilient_jax.planning.errors", "resilient_jax.topology.errors")
"""The modules whose errors reach a script or the command line; others handle the rest among themselves."""
ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
"""A field in the section "Attributes:" of a docstring, and its description."""
WHOSE_MOVE = {CallerError: "the caller", OperatorError: "the operator", PeerError: "a peer"}


def list_documented_values(documented: type | ModuleType) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value as in the code or "", docstring on one line) of each assignment in a class or module."""
    body = ast.parse(inspect.getsource(documented)).body
    match body:
        case [ast.ClassDef(body=inner)] if isinstance(documented, type):
            body = inner
        case _:
            pass
    for index, statement in enumerate(body):
        match statement:
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=value)
                | ast.Assign(targets=[ast.Name(id=name)], value=value)
            ):
                yield name, ast.unparse(value) if value else "", _find_docstring(body[index + 1 :])


def _find_docstring(rest: list[ast.stmt]) -> str:
    match rest:
        case [ast.Expr(value=ast.Constant(value=str() as text)), *_]:
            return join_lines(text)
    return ""


def make_configuration() -> str:
    """Return the page of the configuration's keys."""
    return make_page(
        "Configuration",
        "What `--config job.toml` sets, with defaults. Every agent of a job must have the same values.",
        ("key", "default", "meaning"),
        ((f"`{name}`", f"`{value}`", text) for name, value, text in list_documented_values(JobConfig)),
    )


def make_exit_codes() -> str:
    """Return the page of the exit codes."""
    return make_page(
        "Exit codes",
        "What `resilient-jax agent` and `launch` exit with. What to do about each: [failures](../failures.md).",
        ("code", "name", "meaning"),
        ((value, f"`{name}`", text) for name, value, text in list_documented_values(ExitCode)),
    )


def make_events() -> str:
    """Return the page of the events."""
    documented = ((ast.literal_eval(value), text) for _, value, text in list_documented_values(EventKind))
    return make_page(
        "Events",
        "What each host records in `HOST.events.jsonl` of its run folder, one JSON object a line: `kind`, `host`, "
        "`monotonic_s`, `wall_s`, where it applies `generation` and `step`, and `detail` with what the last column "
        "names. Durations are in seconds.",
        ("kind", "what happened", "detail"),
        ((f"`{kind}`", *split_detail(text)) for kind, text in documented),
    )


def split_detail(text: str) -> tuple[str, str]:
    """Return (what happened, what its detail has) of an event's docstring."""
    happened, _, detail = text.partition(" Detail: ")
    return happened, detail.rstrip(".")


def make_failpoints() -> str:
    """Return the page of the failpoints."""
    return make_page(
        "Failpoints",
        "Where an order holds or breaks a worker or a snapshot server; in a campaign `failpoint` of a manifest's "
        "`trigger`. [Break it on purpose](../operations.md#break-it-on-purpose) says how.",
        ("failpoint", "where it is"),
        ((f"`{ast.literal_eval(value)}`", text) for _, value, text in list_documented_values(FailPoint)),
    )


def make_public_names() -> str:
    """Return the page of the names of `rj`, each with the first sentence of its docstring."""
    return make_page(
        "Public names",
        "What `import resilient_jax as rj` offers, in one table: `rj.data` brings a job's data, "
        "`rj.planning` plans its devices. Arguments, fields and errors of each: "
        "[API reference](../api.md).",
        ("name", "what it is or does"),
        ((f"`rj.{name}`", find_public_summary(name)) for name in list_public_names()),
    )


def list_public_names() -> list[str]:
    """Return the names that `rj` and its groups offer, as scripts write them after `rj.`."""
    names = [name for name in rj.__all__ if name not in GROUPS]
    names += [f"{group}.{name}" for group in GROUPS for name in getattr(rj, group).__all__]
    return sorted(names, key=lambda name: (name.count("."), name.lower()))


def find_public_summary(name: str) -> str:
    """Return the first paragraph of the docstring of a name of `rj`; of an alias the first sentence."""
    value = operator.attrgetter(name)(rj)
    if inspect.isclass(value) or inspect.isfunction(value):
        return find_summary(value)
    module = importlib.import_module(read_homes(rj.__name__)[name])  # an alias does not know its module
    text = next(text for found, _, text in list_documented_values(module) if found == name)
    return text.split(". ")[0].rstrip(".") + "."


def make_errors() -> str:
    """Return the page of the errors that a script or an operator meets."""
    return make_page(
        "Errors",
        "What is raised on purpose. A message says what was found, what was expected, where, and what to do. "
        "`rj.ResilientJaxError` is the root of all; an error that a command ends with becomes one line and the exit "
        "code; one that a script raises is a traceback, and exit code 1 as Python's. Whose move it is: the caller's "
        "(arguments, configuration, script), the operator's (machine, network, token), a peer's (a message or host "
        "that is not as agreed), or ours (a bug).",
        ("error", "whose move", "exit code", "meaning"),
        (
            (
                f"`{name_public(error.__name__)}`",
                find_whose_move(error),
                str(int(error.exit_code)),
                find_summary(error),
            )
            for error in list_errors()
        ),
    )


def list_errors() -> list[type[ResilientJaxError]]:
    """Return the error classes of `ERROR_MODULES`, in the order of the code."""
    return [
        value
        for module in ERROR_MODULES
        for value in vars(importlib.import_module(module)).values()
        if isinstance(value, type) and issubclass(value, ResilientJaxError) and value.__module__ == module
    ]


def name_public(name: str) -> str:
    """Return a name as scripts write it: with `rj.` and its group if it is public."""
    return next((f"rj.{each}" for each in list_public_names() if each.rpartition(".")[2] == name), name)


def find_whose_move(error: type[ResilientJaxError]) -> str:
    """Return who can do something about an error."""
    if error is ResilientJaxError:
        return ""
    return next((who for root, who in WHOSE_MOVE.items() if issubclass(error, root)), "ours")


def make_commands() -> str:
    """Return the page of the commands of `resilient-jax`, each with its arguments and options."""
    app: Any = typer.main.get_command(build_app(COMMANDS))  # a group of commands, says no type
    sections = ["# Commands\n\nWhat `resilient-jax COMMAND --help` shows."]
    for name, spec in COMMANDS.items():
        command = app.commands[name]
        sections += [f"## {name}", f"*{spec.task}.* {find_first_paragraph(command.help)}"]
        rows = [describe_parameter(parameter) for parameter in command.params if not parameter.hidden]
        sections.append(make_table(("argument or option", "default", "meaning"), rows))
    return "\n\n".join(sections) + "\n"


def describe_parameter(parameter: Any) -> tuple[str, str, str]:  # noqa: ANN401 - typer declares no type for it
    """Return the row (name, default, meaning) of an argument or an option."""
    is_argument = parameter.param_type_name == "argument"
    name = (
        (parameter.metavar or parameter.name.upper())
        if is_argument
        else ", ".join(parameter.opts + parameter.secondary_opts)
    )
    match parameter.default:
        case None | False | "":
            default = "required" if parameter.required else ""
        case _ if isinstance(parameter.show_default, str):
            default = parameter.show_default  # such as one that depends on the machine
        case value:
            default = f"`{value}`"
    meaning = join_lines(parameter.help or "")
    choices = parameter.type_descriptor.annotation
    if isinstance(choices, type) and issubclass(choices, enum.Enum):
        meaning += f" One of {', '.join(f'`{choice.value}`' for choice in choices)}."
    return f"`{name}`", default, meaning


def make_status_keys() -> str:
    """Return the page of the keys that `resilient-jax status --json` prints."""
    sections = [
        "# Keys of `status --json`\n\n`resilient-jax status RUN_DIR --json` prints one `JobReport`; of a job that is "
        "over, one `EndedJob`. "
        "A structure is an object with all of these keys; `None` is `null`."
    ]
    for struct in list_structs(JobReport | EndedJob):
        described = dict(ATTRIBUTE.findall(inspect.getdoc(struct) or ""))
        # What a part of a record is stands at the part itself.
        rows = [
            (f"`{key}`", name_type(hint), capitalize(join_lines(described.get(key) or find_summary(hint))))
            for key, hint in typing.get_type_hints(struct).items()
        ]
        sections += [f"## {struct.__name__}", find_summary(struct)]
        sections.append(make_table(("key", "type", "meaning"), rows))
    return "\n\n".join(sections) + "\n"


def list_structs(hint: Any) -> list[type[msgspec.Struct]]:  # noqa: ANN401 - any type hint
    """Return the structures that a type hint mentions, themselves or in their fields, each once."""
    if not (isinstance(hint, type) and issubclass(hint, msgspec.Struct)):
        inner = typing.get_args(hint)
        found = []
    else:
        inner = typing.get_type_hints(hint).values()
        found = [hint]
    return list(dict.fromkeys([*found, *(struct for each in inner for struct in list_structs(each))]))


def name_type(hint: Any) -> str:  # noqa: ANN401 - any type hint
    """Return how a table shows a type hint: an enum by its values, what is unique to Python by its place in JSON."""
    if isinstance(hint, enum.EnumMeta):
        return ", ".join(f"`{member.value}`" for member in typing.cast("type[enum.Enum]", hint))
    if typing.get_origin(hint) is tuple:
        places = typing.get_args(hint)
        if places[-1] is not Ellipsis:  # one value for each place
            return f"[{', '.join(map(name_type, places))}]"
        return f"list of {name_type(places[0])}"
    if typing.get_origin(hint) is dict:
        key, value = typing.get_args(hint)
        return f"object of {name_type(value)} by {name_type(key)}"
    if inner := typing.get_args(hint):
        return " or ".join(name_type(each) for each in inner)
    plain = getattr(hint, "__supertype__", hint)  # a NewType stands for a number or a string
    return f"`{'None' if plain is type(None) else plain.__name__}`"


def make_phases() -> str:
    """Return the page of the three machines behind a recovery: which event moves which phase."""
    sections = [
        "# Phases\n\nThree machines take a job through a failure, or a planned change. The leader moves the "
        "*generation* through its phases. Each host's agent orders its *worker* by what the store says. The worker "
        "answers. [The walk of a failure](../design/failure.md) shows them together. Tests hold the code against "
        "these tables.",
        "## The generation\n\n" + find_first_paragraph(inspect.getdoc(GenerationPhase)),
        make_table(
            ("phase", "what happens in it"),
            (
                (f"`{ast.literal_eval(value)}`", text)
                for _, value, text in list_documented_values(GenerationPhase)
            ),
        ),
        "Between two phases:",
        make_table(
            ("from", "to", "number", "when"),
            (
                (f"`{move.before}`", f"`{move.after}`", "next" if move.opens_number else "same", move.when)
                for move in PHASE_MOVES
            ),
        ),
        "A death leads through `quiesce` (steps 3 to 5 of the walk), `form` (6) and `active` (7, 8), all under one "
        "number. The return (9) leads through `pause`, `boundary` and `form` to `active`, under the next one.",
        "## What an agent orders\n\nA worker is *seated* if it is a member; a *newcomer* if it was given a seat of the "
        "world in which others train; else an *outsider*. A host that reads an older "
        "generation than the newest it knows refuses it. Once "
        "all are in a new world, services of older worlds stop.",
        find_table(generation_orders),
        "A standby with a seat, beside a worker that trains:",
        find_table(standby_orders),
        "## The worker\n\nEach move is reported to the agent.",
        make_table(
            ("from", "event", "to", "and"),
            ((f"`{move.before}`", move.event, f"`{move.after}`", move.effect) for move in WORKER_MOVES),
        ),
        "What an order does, which never changes the state by itself:",
        make_table(
            ("order", "in state", "interrupts", "answered", "effect"),
            (
                (
                    f"`{row.order.__name__}`",
                    "any" if row.states == ALIVE else ", ".join(f"`{state}`" for state in row.states),
                    "yes" if row.interrupts else "",
                    "yes" if row.is_answered else "",
                    row.effect,
                )
                for row in ORDER_EFFECTS
            ),
        ),
    ]
    return "\n\n".join(sections) + "\n"


def find_table(module: ModuleType) -> str:
    """Return the table in a module's docstring, without the spaces that align its columns."""
    lines = [line for line in (inspect.getdoc(module) or "").splitlines() if line.startswith("|")]
    header, _, *rows = (tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines)
    return make_table(header, rows)


def make_page(title: str, intro: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a page with one table."""
    return f"# {title}\n\n{intro}\n\n{make_table(header, rows)}\n"


def make_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table of Markdown, without a newline at its end."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def find_summary(documented: object) -> str:
    """Return the first paragraph of a docstring, as a cell of a table."""
    return find_first_paragraph(inspect.getdoc(documented))


def find_first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a text, as a cell of a table."""
    return join_lines((text or "").split("\n\n")[0])


def capitalize(text: str) -> str:
    """Return a text with its first letter capital, the others as they are."""
    return text[:1].upper() + text[1:]


def join_lines(text: str) -> str:
    """Return a text on one line, as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {
    "public_names.md": make_public_names,
    "configuration.md": make_configuration,
    "exit_codes.md": make_exit_codes,
    "errors.md": make_errors,
    "events.md": make_events,
    "failpoints.md": make_failpoints,
    "phases.md": make_phases,
    "commands.md": make_commands,
    "status_keys.md": make_status_keys,
}


def main() -> None:
    """Write every page."""
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(MARK + make())


if __name__ == "__main__":
    main()
