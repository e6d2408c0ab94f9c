"""Scenarios of the membership as texts: what happens to a job, and what its leader does about it.

A file has scenarios one after the other. Each begins with its promise behind `=== `. Then a line is

- `# ...`: a comment,
- a command, which is something that happens: `lost b`, `wait 5.5`, `report a step=7 holds_state=false`,
- indented: what the leader does about the command before. It is computed; `pytest --rewrite` writes it into the file.

Of a generation that the leader publishes only what is new is shown. Nothing below a command: the leader does nothing.
`COMMANDS` has all commands; each does what the method of `membership_job.Job` does that it calls.

Scenarios that begin alike share a beginning. It has a name behind `--- `, and stands before them in their file. The
first command of a scenario is then `after NAME`, with further settings of the job.
"""

import dataclasses
import enum
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from resilient_jax.ids import GenerationNumber, HostName, Incarnation
from resilient_jax.membership.commands import (
    MembershipCommand,
    PublishGeneration,
    QuarantineDevice,
    QuarantineHost,
)
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.job_start import make_initial_state
from resilient_jax.membership.machine import HostChanged, HostLeft, HostProgressed, QuarantineChanged, Tick
from resilient_jax.membership.redundancy import measure_redundancy
from resilient_jax.membership.spare_hosts import list_unseated
from resilient_jax.membership.state_loss import StateLossPolicy
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.policy.failure_forecast import add_return, count_losses
from resilient_jax.protocol.generation import Generation, GenerationPhase, Member, SeatId
from resilient_jax.protocol.host_status import HostStatus, StandbyState, StandbyStatus, WorkerStatus
from resilient_jax.protocol.record_parts import change_fields, find_parts, find_types, read_field
from resilient_jax.protocol.recovery_records import JobHistory, LossCause, NeededHosts, RecoveryDecision
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost, SlownessRecord
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotPhase, SnapshotStatus
from resilient_jax.protocol.state_records import PartHolder, StageLoss, StageOutlook, StatePart, UnitKind
from resilient_jax.protocol.worker_report import (
    StateDoubt,
    WorkerFailure,
    WorkerFailureKind,
    WorkerReport,
    WorkerState,
)
from resilient_jax.protocol.worker_tasks import OverdueTask, WorkerTask
from tests.support.membership_job import (
    Job,
    change_leader,
    keep,
    know,
    server,
    sharded,
    snapshot,
    stop_at_boundary,
    training,
)

TITLE: Final = "=== "
BEGINNING: Final = "--- "
AFTER: Final = "after"
INDENT: Final = "    "
WIDTH: Final = 116
PLACE: Final = "`load_batch`, line 40 of train.py"
"""Where every thread is that hangs."""
UNITS: Final = 7
PARTS: Final = {"front": range(4), "back": range(4, UNITS), "whole": range(UNITS)}
RANKS: Final = {"rank0": [0], "rank1": [1], "no-rank": []}
"""Of a state in shards on replicas of two hosts."""
SHARED_OUT: Final = {"first-of-4": [0], "second-of-4": [1], "third-of-4": [2], "fourth-of-4": [3]}
"""Of a state in shards on all of four hosts."""
"""The blocks of a model of two stages."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A command or a comment, with what is shown below it."""

    text: str
    shown: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A promise, and what happens to a job of which it must be true; or how several of them begin."""

    title: str
    lines: tuple[Line, ...]
    is_beginning: bool = False

    def format(self) -> str:
        """Return its text in a file."""
        found = [(BEGINNING if self.is_beginning else TITLE) + self.title]
        for line in self.lines:
            found += [line.text, *(INDENT + shown for shown in line.shown)]
        return "\n".join(found) + "\n"

    def play(self, beginnings: Mapping[str, "Scenario"]) -> Self:
        """Return the scenario with what the leader really does.

        Args:
            beginnings: those of its file, by name.
        """
        player, lines = Player(), list[Line]()
        for line in self.lines:
            verb, *words = line.text.split()
            shown: list[str] = []
            if verb == AFTER:
                player.begin(beginnings[words[0]], words[1:])
            elif verb != "#":
                shown = player.play(line.text)
            lines.append(Line(text=line.text, shown=tuple(shown)))
        return dataclasses.replace(self, lines=tuple(lines))


def parse_scenarios(text: str) -> tuple[str, list[Scenario]]:
    """Return what stands before the first scenario of a file, and the scenarios and beginnings."""
    head, *parts = re.split(rf"(?m)^(?={TITLE}|{BEGINNING})", text)
    return head, [_parse(part) for part in parts]


def _parse(text: str) -> Scenario:
    title, *rest = text.splitlines()
    lines: list[Line] = []
    for line in filter(str.strip, rest):
        if line.startswith(INDENT):
            lines[-1] = dataclasses.replace(lines[-1], shown=(*lines[-1].shown, line.removeprefix(INDENT)))
        else:
            lines.append(Line(text=line))
    return Scenario(title=title[len(TITLE) :], lines=tuple(lines), is_beginning=title.startswith(BEGINNING))


def play_scenarios(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Return the scenarios of a file with what the leader really does."""
    beginnings = {one.title: one for one in scenarios if one.is_beginning}
    return [one.play(beginnings) for one in scenarios]


def format_scenarios(head: str, scenarios: Iterable[Scenario]) -> str:
    """Return the text of a file."""
    return "\n".join([head.rstrip() + "\n", *(scenario.format() for scenario in scenarios)])


class Player:
    """Has the commands of one scenario happen, and says what the leader does."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._shown: Generation | None = None
        self._before_loss: dict[str, HostStatus] = {}
        self._has_options = False

    def begin(self, beginning: Scenario, settings: Sequence[str]) -> None:
        """Have all of a beginning happen, with further settings of the job."""
        first, *rest = (line.text for line in beginning.lines if not line.text.startswith("#"))
        for text in (" ".join([first, *settings]), *rest):
            self.play(text)

    def play(self, text: str) -> list[str]:
        """Return what to show below a command."""
        verb, *words = shlex.split(text)
        names = [name for word in words if "=" not in word for name in _expand(word)]
        values = dict(word.split("=", 1) for word in words if "=" in word)
        if verb in STARTS:
            self._job = STARTS[verb](*names, **_read_config(values))
            shown = self._show(self._job.commands)
            return shown if verb == "job" else []  # else it trains, as it is said
        assert self._job is not None, f"{text}: a scenario begins with one of {', '.join(STARTS)}"
        if verb == "show":
            return [line for name in names for line in SHOWN[name](self._job)]
        if verb == "options":
            self._has_options = True
            return []
        if verb == "lost":
            self._before_loss |= {name: self._job.status(name) for name in names}
        if verb == "returns":
            events = [HostChanged(self._before_loss[name]) for name in names]
            return [line for event in events for line in self._show(_give(self._job, event))]
        return self._show(_record(self._job, lambda job: COMMANDS[verb](job, names, values)))

    def _show(self, commands: Sequence[MembershipCommand]) -> list[str]:
        decided = {
            decision.reason
            for command in commands
            if isinstance(command, PublishGeneration)
            for decision in _list_decisions(command.generation)
            if decision is not None
        }
        lines: list[str] = []
        for command in commands:
            match command:
                case PublishGeneration(generation):
                    lines += self._show_generation(generation)
                case StartCoordinationService(world, processes, seats):
                    text = f"start the service of world {world} for {processes} hosts, {seats} seats"
                    if text not in lines:  # until it runs it is asked for after each event
                        lines.append(text)
                case QuarantineHost(host, reason, before):
                    why = "" if reason in decided else f": {reason}"
                    lines += _wrap(f"quarantine {host}, out {before} times before{why}")
                case QuarantineDevice():
                    uuid = f" ({command.uuid})" if command.uuid else ""
                    why = "" if command.reason in decided else f": {command.reason}"
                    device = f"device {command.device}{uuid} of {command.host}"
                    lines += _wrap(f"quarantine {device}, out {command.num_before} times before{why}")
        return lines

    def _show_generation(self, generation: Generation) -> list[str]:
        stored = msgspec.msgpack.encode(generation)
        assert msgspec.msgpack.decode(stored, type=Generation) == generation, "it does not survive the store"
        before, self._shown = self._shown, generation
        lines = describe_change(before, generation)
        earlier = (None, None) if before is None else _list_decisions(before)
        for decision, old in zip(_list_decisions(generation), earlier, strict=True):
            if self._has_options and decision is not None and decision != old:
                lines += _show_options(decision)
        return lines


def _list_decisions(generation: Generation) -> tuple[RecoveryDecision | None, RecoveryDecision | None]:
    return generation.record.decision, generation.record.slowness.decision


def _record(job: Job, act: Callable[[Job], object]) -> list[MembershipCommand]:
    """Return what the leader commands while something happens."""
    before = len(job.commands)
    act(job)
    return job.commands[before:]


def _give(job: Job, event: HostChanged) -> list[MembershipCommand]:
    return _record(job, lambda job: job.give(event))


# What the leader does, in words.


def describe_change(before: Generation | None, generation: Generation) -> list[str]:
    """Return what is new in a generation, in the order of its fields."""
    said = [f"generation {generation.number} {generation.phase}"]
    if generation.phase is GenerationPhase.FORM:
        said[0] += f" ({generation.membership.change}, world {generation.membership.world})"
    decided = {decision.reason for decision in _list_decisions(generation) if decision is not None}
    nothing = Generation(number=GenerationNumber(0), phase=GenerationPhase.QUIESCE)
    assert sorted(SAID.split()) == sorted(find_types(Generation)), (
        "each field of a generation is said in an order"
    )
    for name in SAID.split():
        value, old = read_field(generation, name), read_field(before or nothing, name)
        if value == old or name in HIDDEN or (name == "reason" and value in decided):
            continue
        if name == "slowness":
            said += _describe_slowness(SlownessRecord() if before is None else before.record.slowness, value)
        else:
            said.append(DESCRIBED.get(name, _describe_plainly(name))(value))
    return _wrap("; ".join(said))


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


SAID: Final = """
    number phase change world num_seats next_seat members max_members stage_hosts earlier_stage_hosts plan_axes
    plan_constants newcomers spares service_address step boundary_step ends_job parts_stay next_members sources
    receivers part_holders snapshot state_loss trusted_step unreadable_snapshots void_snapshots
    dropped_workers progress losses_left needed_hosts
    keeps_workers protection initial_generation attempts are_parts_doubtful
    failed_host suspects taken_out separated failure_text raised reason hang decision history slowness outcome
"""
"""The fields of a generation, in the order in which what is new is said."""
HIDDEN: Final = frozenset({"number", "phase", "change", "world", "history", "service_address", "protection"})
"""Said with the phase; shown by `show`; or known from `serves`."""


def _describe_plainly(name: str) -> Callable[[Any], str]:
    words = name.replace("_", " ")

    def describe(value: object) -> str:
        if isinstance(value, tuple):
            return f"{words} {', '.join(map(_say, value)) or 'none'}"
        return f"{words} {_say(value)}"

    return describe


def _say(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case enum.StrEnum() | str() | int():
            return str(value) or "none"
        case tuple():
            return "(" + ", ".join(map(_say, value)) + ")"
        case SnapshotId(step, generation):
            return f"{step}@{generation}"
        case _:
            fields = {name: getattr(value, name) for name in value.__struct_fields__}  # pyright: ignore[reportAttributeAccessIssue]
            return "{" + ", ".join(f"{name} {_say(one)}" for name, one in fields.items()) + "}"


def _list_members(kind: str) -> Callable[[tuple[Member, ...]], str]:
    def describe(members: tuple[Member, ...]) -> str:
        listed = [f"{m.host}:{m.seat}" + (f"#{m.incarnation}" if m.incarnation > 1 else "") for m in members]
        if len(listed) > MANY:
            listed = [*listed[: MANY // 2], "...", listed[-1], f"({len(members)})"]
        return f"{kind} {' '.join(listed) or 'none'}"

    return describe


MANY: Final = 12


def _describe_sources(sources: tuple[Any, ...]) -> str:
    hosts = [source.host for source in sources]
    return f"sources {', '.join(hosts) or 'none'}" if len(hosts) <= MANY else f"{len(hosts)} sources"


def _describe_decision(decision: RecoveryDecision | None) -> str:
    if decision is None:
        return "decision none"
    more = {
        "joining": ", ".join(decision.joining),
        "awaited": ", ".join(decision.awaited),
        "for": f"{decision.wait_s:.3g} s" if decision.wait_s else "",
        "slow": decision.slow,
        "devices": ", ".join(map(str, decision.devices)),
        "stages of": ", ".join(decision.stage_hosts),
        "axes": _say(decision.plan_axes) if decision.plan_axes else "",
    }
    details = "".join(f", {name} {value}" for name, value in more.items() if value)
    return f"decision {decision.action}{details}: {shorten_reason(decision.reason)}"


def shorten_reason(reason: str) -> str:
    """Return why something was decided, without what the second best option would have cost: `options` shows that."""
    return re.sub(r"; to \w+ would lose .*", "", reason)


def _show_options(decision: RecoveryDecision) -> list[str]:
    lines = []
    for option in sorted(decision.options, key=lambda one: one.action):
        why_not = f"; not possible: {option.why_not}" if option.why_not else ""
        lines += _wrap(f"- {option.action} {option.score:.6f}, {option.describe_speed()}{why_not}")
    return lines


def _describe_holders(holders: tuple[PartHolder, ...]) -> str:
    newest = max((holder.step for holder in holders), default=0)
    named = (f"{one.host}{'' if one.step == newest else f' (step {one.step})'}" for one in holders)
    return f"state in parts on {', '.join(named)}" if holders else "state in parts on none"


DESCRIBED: Final[Mapping[str, Callable[[Any], str]]] = {
    "members": _list_members("members"),
    "newcomers": _list_members("newcomers"),
    "sources": _describe_sources,
    "part_holders": _describe_holders,
    "snapshot": lambda plan: (
        f"snapshot {_say(plan.id)} of {', '.join(source.host for source in plan.sources)}"
        if plan is not None
        else "snapshot none"
    ),
    "reason": lambda reason: f'"{reason}"',
    "needed_hosts": lambda needed: (
        f"needs {needed.count} hosts, as {needed.num_hosts} found at step {needed.step} in {needed.generation}"
        if needed.count > 1
        else "needed hosts forgotten"
    ),
    "hang": lambda hang: f'hang "{hang}"' if hang else "hang none",
    "decision": _describe_decision,
    "outcome": lambda outcome: (
        f"outcome {outcome.kind}, code {outcome.exit_code}"
        f"{f', of {outcome.host}' if outcome.host else ''}: {outcome.message}"
    ),
}


def _describe_slowness(old: SlownessRecord, record: SlownessRecord) -> list[str]:
    said = [] if record.decision == old.decision else [f"slowness {_describe_decision(record.decision)}"]
    said += [] if record.speeds == old.speeds else [f"layers by speeds {_say(record.speeds)}"]
    said += [
        f"{one.host} taken out {one.count} times" for one in record.taken_out if one not in old.taken_out
    ]
    said += [
        f"device {one.device} of {one.host} taken out {one.count} times"
        for one in record.devices
        if one not in old.devices
    ]
    said += [] if record.out == old.out else [f"out {', '.join(record.out) or 'none'}"]
    starting = [f"{host}#{incarnation}" for host, incarnation in record.restarting]
    return said + (
        [] if record.restarting == old.restarting else [f"restarting {', '.join(starting) or 'none'}"]
    )


def _show_history(job: Job) -> list[str]:
    history: JobHistory = job.generation.record.history
    lines = [f"watched {history.observed_s:g} s, {history.failures} failures, {history.step_s:.3g} s a step"]
    for loss in history.host_losses:
        back = f", back {loss.num_returns} times after {loss.return_s:.3g} s" if loss.num_returns else ""
        lines.append(f"{loss.host} lost {loss.count} times: {loss.cause}{back}")
    lines += [f"{one.host} away: {one.cause}" for one in history.away]
    lines += [f"{time.change} takes {time.typical_s:.3g} s ({time.count})" for time in history.times]
    return lines


def _show_redundancy(job: Job) -> list[str]:
    found = measure_redundancy(job.state)
    return ["no state"] if found is None else [_say_redundancy(found)]


def _say_redundancy(found: Any) -> str:
    return f"{found.copies} copies, {found.losses} more losses{', in parts' if found.is_in_parts else ''}"


def _show_protection(job: Job) -> list[str]:
    found = job.generation.state.protection
    when = "from the first commit on" if found.from_first_commit else "after some steps"
    return [f"protected {when}; the next failure in {found.next_failure_s:.4g} s"]


SHOWN: Final[Mapping[str, Callable[[Job], list[str]]]] = {
    "history": _show_history,
    "protection": _show_protection,
    "redundancy": _show_redundancy,
    "unseated": lambda job: [", ".join(list_unseated(job.state, job.config)) or "none"],
}


# What happens.


def _expand(word: str) -> list[str]:
    """Return the names that a word stands for: `h000..h149` for all in between."""
    first, dots, last = word.partition("..")
    if not dots:
        return [word]
    prefix = first.rstrip("0123456789")
    width = len(first) - len(prefix)
    return [f"{prefix}{n:0{width}}" for n in range(int(first[len(prefix) :]), int(last[len(prefix) :]) + 1)]


def _read(text: str) -> Any:
    """Return the value of a simple field."""
    named = {"true": True, "false": False, "none": None}
    if text in named:
        return named[text]
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _read_config(values: Mapping[str, str]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(MembershipConfig)} | {
        "step",
        "parity",
        "do_agents_answer",
    }
    assert values.keys() <= known, f"{values.keys() - known}: no such setting"
    found = {name: _read(text) for name, text in values.items()}
    if "state_loss_policy" in found:
        found["state_loss_policy"] = StateLossPolicy(found["state_loss_policy"])
    return found


def _read_failure(text: str) -> WorkerFailure | None:
    if text == "none":
        return None
    kind, _, words = text.partition(":")
    said, _, trusted = words.partition(":trusted=")
    return WorkerFailure(
        kind=WorkerFailureKind(kind),
        text=said,
        doubt=StateDoubt(trusted_step=int(trusted) if trusted else None),
    )


def _read_needed_hosts(text: str) -> NeededHosts:
    """Return what members have found: `3/2/6@1` is that they need 3 hosts, as 2 found at step 6 in generation 1."""
    counts, _, generation = text.partition("@")
    count, num_hosts, step = map(int, counts.split("/"))
    return NeededHosts(
        generation=GenerationNumber(int(generation)), count=count, num_hosts=num_hosts, step=step
    )


def _read_overdue(text: str) -> OverdueTask | None:
    if text == "none":
        return None
    task, _, silent_s = text.partition(":")
    return OverdueTask(
        task=WorkerTask(task.replace("_", " ")),
        step=7,
        place=PLACE,
        silent_s=float(silent_s or 6),
        deadline_s=5.0,
    )


def _read_snapshot(text: str) -> SnapshotId | None:
    if text == "none":
        return None
    step, _, generation = text.partition("@")
    return SnapshotId(int(step), GenerationNumber(int(generation or 1)))


def _read_part(text: str) -> StatePart | None:
    """Return a part such as `rank1`, `rank0,tensor`, `front`, `back,order=abcd@1`, or `whole,estimate=100`."""
    if text == "none":
        return None
    units, *more = text.split(",")
    if units in RANKS:
        return StatePart.from_units(RANKS[units], 2, UnitKind.RANKS, [(axis, 4) for axis in more])
    if units in SHARED_OUT:
        return StatePart.from_units(SHARED_OUT[units], 4, UnitKind.HOSTS)
    part = StatePart.from_units(PARTS[units], UNITS)
    for word in more:
        name, value = word.split("=")
        match name:
            case "order":
                order, _, generation = value.partition("@")
                part = msgspec.structs.replace(
                    part, order=tuple(map(HostName, order)), generation=GenerationNumber(int(generation or 1))
                )
            case "generation":
                part = msgspec.structs.replace(part, generation=GenerationNumber(int(value)))
            case "replicas":
                part = msgspec.structs.replace(part, outlook=_make_outlook(value.split("+")))
            case (
                "losses"
            ):  # of each of these groups of hosts: speeds with stages kept and cut anew, and the move
                part = msgspec.structs.replace(part, losses=(*part.losses, *_make_losses(value)))
    return part


def _make_losses(text: str) -> list[StageLoss]:
    """Return what losses make of a pipeline, from a text such as `a+b+cd/0.9/0.95/100`."""
    groups, kept, cut, move_s = text.split("/")
    return [
        StageLoss(hosts=tuple(map(HostName, group)), kept=float(kept), cut=float(cut), move_s=float(move_s))
        for group in groups.split("+")
    ]


def _make_outlook(replicas: list[str]) -> StageOutlook:
    """Return what the loss of any hosts of these replicas makes of a pipeline: half of the speed is kept, or less."""
    numbers = range(1, 4)
    return StageOutlook(
        replicas=tuple(tuple(map(HostName, replica)) for replica in replicas),
        kept=(1.0, *(0.6 / number if number < len(replicas) else 0.0 for number in numbers)),
        cut=(1.0, *(0.9 - 0.1 * number for number in numbers)),
        move_s=(0.0, *(50.0 for _ in numbers)),
    )


SPECIAL: Final[Mapping[str, Callable[[str], Any]]] = {
    "state": WorkerState,
    "failure": _read_failure,
    "needed_hosts": _read_needed_hosts,
    "overdue": _read_overdue,
    "copied": _read_snapshot,
    "snapshot": _read_snapshot,
    "part": _read_part,
    "corrupt_hosts": lambda text: tuple(map(HostName, text.split(","))) if text != "none" else (),
    "gpus": lambda text: (text,),
    "gpu_uuids": lambda text: tuple(text.split(",")),
    "snapshots": lambda text: tuple(map(_make_snapshot, text.split(","))) if text != "none" else (),
}


def _read_fields(kind: type[msgspec.Struct], values: Mapping[str, str]) -> dict[str, Any]:
    known = {*kind.__struct_fields__, *find_parts(kind)}
    assert values.keys() <= known, f"{values.keys() - known}: no such field of {kind.__name__}"
    return {name: SPECIAL.get(name, _read)(text) for name, text in values.items()}


Values = Mapping[str, str]


def _report(job: Job, names: list[str], values: Values) -> None:
    for name in names:
        seat = {"seat": job.find_seat(name)} if values.get("seat") == "given" else {}
        simple = {key: text for key, text in values.items() if text != "given"}
        job.report(name, **_read_fields(WorkerReport, simple), **seat)


def _idle(job: Job, names: list[str], values: Values) -> None:
    job.acknowledge(*names, **_read_fields(WorkerReport, values))


def _worker(job: Job, names: list[str], values: Values) -> None:
    for name in names:
        job.worker(name, **_read_fields(WorkerStatus, values))


def _host(job: Job, names: list[str], values: Values) -> None:
    simple = {key: text for key, text in values.items() if key != "snapshot_server"}
    for name in names:
        running = {"none": None, "runs": server(name)}
        changes = _read_fields(HostStatus, simple)
        if "snapshot_server" in values:
            changes["snapshot_server"] = running[values["snapshot_server"]]
        job.change(name, **changes)


def _die(job: Job, names: list[str], values: Values) -> None:
    """`dies b`: the worker of b is killed; with fields of the host that its agent reports with it."""
    for name in names:
        ended = msgspec.structs.replace(job.worker_of(name), exit_code=-9)
        job.change(name, worker=ended, **_read_fields(HostStatus, values))


def _restart(job: Job, names: list[str], values: Values) -> None:
    """`restart b`: b has a new worker, which is idle, or reports what is given."""
    report: dict[str, Any] = {"state": WorkerState.IDLE}
    report |= _read_fields(WorkerReport, {key: text for key, text in values.items() if key != "incarnation"})
    for name in names:
        worker = WorkerStatus(
            incarnation=Incarnation(int(values.get("incarnation", 2))),
            pid=2,
            report=change_fields(WorkerReport(), **report),
        )
        job.change(name, worker=worker)


def _keep(job: Job, names: list[str], values: Values) -> None:
    """`keeps a b 5@1 7@2 group=abcd parity=1 phase=committed`: the servers of a and b have these snapshots alone."""
    hosts = "".join(name for name in names if not name[0].isdigit())
    usual = (values.get("group", hosts), values.get("parity", "1"), values.get("phase", "complete"))
    keep(job, hosts, *(_make_snapshot(name, usual) for name in names if name[0].isdigit()))


def _make_snapshot(text: str, usual: tuple[str, str, str] = ("", "1", "complete")) -> SnapshotStatus:
    """Return a snapshot such as `5@1` or `5@1/abcd/2/committed`: its group, parity, and how far it is."""
    id_text, *given = text.split("/")
    group, parity, phase = (*given, *usual[len(given) :])
    id = _read_snapshot(id_text)
    assert id is not None
    made = snapshot(id.step, group, generation=id.generation, parity=int(parity))
    return msgspec.structs.replace(made, phase=SnapshotPhase(phase))


def _slow(job: Job, names: list[str], values: Values) -> None:
    """`slow c b kept=0.8 replaced=1 ...`: the first worker reports slow hosts, the slowest first, and their price."""
    since, kind = int(values.get("since", 40)), values.get("kind", "compute")
    factor = float(values.get("factor", 3))
    costs = {name: text for name, text in values.items() if name not in ("since", "kind", "factor")}
    slow = tuple(
        SlowHost(host=HostName(name), kind=kind, factor=factor, since_step=since + 5 * place)
        for place, name in enumerate(names)
    )
    fields: dict[str, Any] = {}
    for name, text in costs.items():
        match name:
            case "speeds":
                pairs = [pair.split(":") for pair in text.split(",") if pair]
                fields[name] = tuple((HostName(host), float(speed)) for host, speed in pairs)
            case "devices" | "slow_devices":
                fields[name] = tuple(int(one) for one in text.split(",") if one)
            case _:
                fields[name] = _read(text)
    slowest = HostName(names[0]) if names else HostName("")
    slowdown = Slowdown(generation=job.generation.number, host=slowest, **fields) if fields else None
    job.report("a", slow_hosts=slow, slowdown=slowdown)


def _stand_by(job: Job, names: list[str], values: Values) -> None:
    """`standby b state=idle`: the agent of b has a standby; with `seat=given` it takes the seat that it was given."""
    for name in names:
        report: dict[str, Any] = {"state": WorkerState.IDLE}
        report |= _read_fields(WorkerReport, {key: one for key, one in values.items() if one != "given"})
        if values.get("seat") == "given":
            newcomer = job.generation.membership.find_newcomer(HostName(name), STANDBY)
            assert newcomer is not None, f"the standby of {name} has no seat"
            report["seat"] = SeatId(job.generation.membership.world, newcomer.seat)
            report["world"] = job.generation.membership.world if report["state"] is WorkerState.IDLE else None
        worker = WorkerStatus(incarnation=STANDBY, pid=9, report=change_fields(WorkerReport(), **report))
        job.change(name, standby=StandbyStatus(state=StandbyState.STARTING, pid=9, worker=worker))


STANDBY: Final = Incarnation(9)


def _lose_standby(job: Job, name: str) -> None:
    standby = job.status(name).standby
    assert standby is not None
    assert standby.worker is not None
    dying = msgspec.structs.replace(standby.worker, is_dying=True)
    job.change(name, standby=msgspec.structs.replace(standby, worker=dying))


def _take_over(job: Job, names: list[str], _: Values) -> None:
    for name in names:
        standby = job.status(name).standby
        assert standby is not None, f"{name} has no standby"
        job.change(name, worker=standby.worker, standby=None)


def _cut(job: Job, names: list[str], values: Values) -> None:
    """`cut a b from=c`: a cannot reach c, nor c a, from now on; nor b c."""
    job.cut |= _list_pairs(names, values["from"])


def _mend(job: Job, names: list[str], values: Values) -> None:
    """`mend a b from=c`: they can again."""
    job.cut -= _list_pairs(names, values["from"])


def _list_pairs(names: list[str], others: str) -> set[frozenset[str]]:
    return {
        frozenset((name, other)) for name in names for word in others.split(",") for other in _expand(word)
    }


def _look_around(job: Job, names: list[str], values: Values) -> None:
    """`looks a b lasting=true`: their agents report whom they do not reach; for longer than a lease."""
    for name in names:
        job.look_around(name, is_lasting=values.get("lasting") == "true")


def _boundary(job: Job, names: list[str], _: Values) -> None:
    """`boundary 8`: all members answer the pause and stop before step 8."""
    stop_at_boundary(job, int(names[0]))


def _answer_pause(job: Job, names: list[str], _: Values) -> None:
    """`may-stop 8`: all members answer the pause."""
    for name in job.members:
        job.report(name, generation=job.generation.number, earliest_stop_step=int(names[0]))


def _stop(job: Job, names: list[str], values: Values) -> None:
    """`stops 8`: all members stop before step 8, which was agreed on."""
    step = int(names[0])
    for name in job.members:
        changes = {"step": step, "earliest_stop_step": step, "has_formed": False, "state": WorkerState.IDLE}
        job.report(name, **changes, **_read_fields(WorkerReport, values))


def _spare(job: Job, names: list[str], values: Values) -> None:
    """`spare s`: a host that was started as a spare is ready in its seat; `seat=none`: it has yet to take that."""
    for name in names:
        if values.get("seat") != "none":
            job.spare(name)
        else:
            worker = WorkerStatus(
                incarnation=Incarnation(1), pid=1, report=WorkerReport(state=WorkerState.IDLE)
            )
            job.change(name, is_spare=True, worker=worker)


def _serve(job: Job, names: list[str], values: Values) -> None:
    """`serves b`: the service that was asked for last runs on b, else on a; `hosts=2`: one for two hosts."""
    if "hosts" in values:
        count = int(values["hosts"])
        job.asked.append(StartCoordinationService(job.asked[-1].world, count, count))
    job.serve(*names)
    if "hosts" in values:
        job.asked.pop()


def _serve_too(job: Job, name: str) -> None:
    """Have a second service run for the same world."""
    (service,) = job.status("a").services
    job.change(name, services=(msgspec.structs.replace(service, address=f"{name}:9"),))


def _change_leader(job: Job, names: list[str], values: Values) -> None:
    """`new-leader`: another leader goes on from the store; with `without=a,b` it does not find these hosts there."""
    change_leader(job)
    lost = {name for name in values.get("without", "").split(",") if name}
    if lost:
        hosts = [status for status in job.state.hosts.values() if status.host not in lost]
        job.state = make_initial_state(job.generation, hosts, job.now_s)


def _know(job: Job, names: list[str], values: Values) -> None:
    """`knows reform=20 step=0.5`: the leader has measured that a re-form takes 20 s, and a step half a second."""
    known = {name: float(text) for name, text in values.items()}
    step_s = known.pop("step", None)
    know(job, **known)
    if step_s is not None:
        _set_history(job, msgspec.structs.replace(job.generation.record.history, step_s=step_s))


def _remember(job: Job, names: list[str], values: Values) -> None:
    """`remembers c cause=worker back=8`: c was lost before by its worker's death, and was back after 8 s."""
    history = job.generation.record.history
    for name in names:
        cause = LossCause(values["cause"])
        history = count_losses(history, {HostName(name): cause}, job.generation.number)
        if "back" in values:
            history = add_return(history, HostName(name), cause, float(values["back"]))
    _set_history(job, history)


def _set_history(job: Job, history: JobHistory) -> None:
    generation = change_fields(job.generation, history=history)
    job.state = dataclasses.replace(job.state, generation=generation)


def _for_each(act: Callable[[Job, str], object]) -> Callable[[Job, list[str], Values], None]:
    def run(job: Job, names: list[str], _: Values) -> None:
        for name in names:
            act(job, name)

    return run


def _reach(job: Job, names: list[str], _: Values) -> None:
    """`progress a 9`: what a host has committed since its status was written."""
    job.give(HostProgressed(HostName(names[0]), names[0], int(names[1])))


STARTS: Final[Mapping[str, Callable[..., Job]]] = {
    "job": Job,
    "training": training,
    "sharded": lambda *names, **config: sharded("".join(names), **config),
}
"""How a scenario begins: hosts that are ready, that train, or that train with a snapshot and no complete state."""

COMMANDS: Final[Mapping[str, Callable[[Job, list[str], Values], object]]] = {
    # a host's agent, machine or worker
    "lost": _for_each(lambda job, name: job.give(HostLeft(HostName(name)))),
    "dies": _die,
    "worker": _worker,
    "host": _host,
    "notice": _for_each(lambda job, name: job.change(name, is_draining=True)),
    "out-of-time": _for_each(lambda job, name: job.change(name, is_out_of_time=True)),
    "ctrl-c": _for_each(lambda job, name: job.change(name, is_interrupted=True)),
    "restart": _restart,
    "quarantined": lambda job, names, _: job.give(QuarantineChanged(frozenset(map(HostName, names)))),
    "spare": _spare,
    "standby": _stand_by,
    "standby-dies": _for_each(lambda job, name: _lose_standby(job, name)),
    "takes-over": _take_over,
    "takes-seat": _for_each(lambda job, name: job.take_seat(name)),
    "serves": _serve,
    "serves-too": _for_each(lambda job, name: _serve_too(job, name)),
    "service-ends": _for_each(lambda job, name: job.change(name, services=())),
    "cut": _cut,
    "mend": _mend,
    "looks": _look_around,
    "keeps": _keep,
    # what workers report
    "report": _report,
    "idle": _idle,
    "joins": lambda job, names, _: job.form(*names),
    "steps": lambda job, names, _: job.train(int(names[0])),
    "progress": _reach,
    "boundary": _boundary,
    "may-stop": _answer_pause,
    "stops": _stop,
    "slow": _slow,
    # time, and leaders
    "wait": lambda job, names, _: job.pass_time(float(names[0])),
    "tick": lambda job, *_: job.give(Tick()),
    "new-leader": _change_leader,
    "knows": _know,
    "remembers": _remember,
}


def list_files(folder: Path) -> list[Path]:
    """Return the files of scenarios in a folder."""
    return sorted(folder.glob("*.txt"))
