"""The control benchmark: what membership costs with up to thousands of hosts."""

import enum
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from resilient_jax.errors import CallerError
from tests.benchmarks.control.decision_gaps import EtcdMeasurements, list_gaps
from tests.benchmarks.control.figures import (
    AIMS,
    Figure,
    PartResult,
    Samples,
    make_line,
    make_machine_samples,
    make_plot_data,
    summarize_all,
)
from tests.benchmarks.control.machine_cost import MachineMeasurements
from tests.benchmarks.control.real_agents import measure_agents
from tests.benchmarks.control.simulation import StoreKind, measure_simulations
from tests.benchmarks.paths import JOBS
from tests.benchmarks.plotting import check_can_plot, run_plot_script
from tests.benchmarks.report import describe_machine, open_console, print_json_line
from tests.benchmarks.runs import run_alone

MACHINE_SIZES = (64, 256, 1024, 4096)
PLAIN_SIZES = (64, 256)
"""The plain machine needs an hour for a job of 4,096 hosts."""
SAMPLED_PLAIN_SIZES = (1024,)
SIMULATED_SIZES = (64, 256, 1024, 4096)
AGENT_SIZES = (16, 32, 64)
KILLS_PER_ROUND = 2
HAS_ETCD = shutil.which("etcd") is not None
ETCD_MISSING = "etcd is not installed: apt-get install etcd-server"
SCRIPT_LIMIT_S = 1800.0


class Part(enum.StrEnum):
    """A part of the benchmark."""

    MACHINE = "machine"
    TRANSPORT = "transport"
    AGENTS = "agents"
    ETCD = "etcd"


def control(
    rounds: Annotated[int, typer.Option(help="Times that each thing is measured.")] = 3,
    parts: Annotated[list[Part] | None, typer.Option(help="Repeat for several. [all]")] = None,
    sizes: Annotated[
        list[int] | None, typer.Option(help="Hosts; repeat for several. [those that each part can do]")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the growth with the hosts into this .png.")] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Measure what membership costs the leader and the hosts, with up to thousands of hosts.

    The keys of the line of JSON, for N hosts; medians:

    event_us_N: of the pure machine of the leader, while all hosts train: microseconds for one event, which is a step
    that is reported beside the store, a status with a new snapshot, or one with a worker's report; each of them alone
    as event_us_KIND_N.

    form_cpu_s_N, shrink_cpu_s_N: processor seconds of that machine for all events from the first registration until
    all train, and from the loss of a host until the others do.

    plain_event_us_N and so on: of its specification, the rules applied to all hosts after each event.

    generation_bytes_N, status_bytes_N: of the records after that loss.

    form_s_N: a real leader and N - 1 agents, simulated in two more processes, over the transport and the embedded
    store: from the last registration until every agent has read that all train. shrink_s_N: from the return of a lease
    until every other agent has read the next generation; shrink_active_s_N: until they have read that its members
    train. bytes_per_host_change_N: of the generations that each host reads for it. leader_cpu_N, store_cpu_N: shares
    of a core of these processes while all hosts make a step a second. form_s_etcd_N and so on: with an etcd cluster
    of three members. Simulated agents have leases of 60 s, share a connection to the store by 16, and decode a
    generation once in each process; 32 of them report progress, for all.

    real_agents: the most `resilient-jax agent` processes, with workers that do without JAX, that this machine formed
    and shrank; agents_form_s_N: from the first start of one, agents_form_after_last_start_s_N: from the last,
    agents_shrink_s_N: from SIGKILL, with the 3 s of the lease that has to expire.

    etcd_kill_gap_s: the longest time between two generations that a leader publishes all the time, within 4 s after
    the leader of a cluster of three members was killed; its election time-out is 0.5 s. etcd_calm_gap_s: before.

    spread: least and most; of 20 samples or more, 5 % and 95 %. n: the number of samples. load: processes that waited
    to run, before and after. missing: what was not measured, with the cause. All takes half an hour.
    """
    if rounds < 1 or min(sizes or [2]) < 2:
        raise CallerError(
            f"control: found --rounds {rounds}, --sizes {sizes}; expected 1 round or more of 2 hosts or more"
        )
    if plot is not None:
        check_can_plot(plot)
    console = open_console(json_only)
    before = os.getloadavg()[0]
    console.print(f"load {before:.1f}")
    found: list[PartResult] = []
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        for part in dict.fromkeys(parts or Part):
            console.print(f"{part} ...")
            found.append(_measure(part, Path(folder) / part, rounds, sizes))
        figures = summarize_all(found)
        if plot is not None:
            run_plot_script(JOBS / "plot_control.py", make_plot_data(figures), Path(folder), plot)
    for result in found:
        for what, why in result.missing.items():
            console.print(f"{what}: {why}", markup=False)
    console.print(_tabulate(figures))
    print_json_line(make_line(figures, found, describe_machine(), (before, os.getloadavg()[0])))


def _measure(part: Part, work: Path, rounds: int, sizes: Sequence[int] | None) -> PartResult:
    work.mkdir()
    match part:
        case Part.MACHINE:
            return _measure_machine(work, rounds, sizes)
        case Part.TRANSPORT:
            return _measure_transport(work, rounds, sizes)
        case Part.AGENTS:
            return measure_agents(sizes or AGENT_SIZES, work)
        case Part.ETCD:
            return _measure_etcd(work, rounds)


def _measure_transport(work: Path, rounds: int, sizes: Sequence[int] | None) -> PartResult:
    samples: Samples = {}
    missing: dict[str, str] = {}
    for kind in StoreKind:
        if kind is StoreKind.ETCD and not HAS_ETCD:
            missing[f"{kind} store"] = ETCD_MISSING
            continue
        found = measure_simulations(kind, sizes or SIMULATED_SIZES, rounds, work / kind)
        samples |= found.samples
        missing |= found.missing
    return PartResult(samples=samples, missing=missing)


def _measure_etcd(work: Path, rounds: int) -> PartResult:
    """Run the script that kills the leaders of an etcd cluster.

    Raises:
        InternalError: the script failed.
    """
    if not HAS_ETCD:
        return PartResult(missing={"etcd_kill_gap_s": ETCD_MISSING})
    found = work / "found.json"
    command = [
        str(JOBS / "control_etcd.py"),
        *map(str, (found, work / "members", rounds * KILLS_PER_ROUND)),
    ]
    run_alone(command, work, timeout_s=SCRIPT_LIMIT_S)
    killed, calm = list_gaps(msgspec.json.decode(found.read_bytes(), type=EtcdMeasurements))
    return PartResult(samples={"etcd_kill_gap_s": killed, "etcd_calm_gap_s": calm})


def _measure_machine(work: Path, rounds: int, sizes: Sequence[int] | None) -> PartResult:
    """Run the script that measures the pure machine, in a process of its own.

    Raises:
        InternalError: the script failed.
    """
    ours = sizes or MACHINE_SIZES
    found = work / "found.json"
    listed = [
        _join(ours),
        _join([size for size in PLAIN_SIZES if size in ours]),
        _join([size for size in SAMPLED_PLAIN_SIZES if size in ours]),
    ]
    script = str(JOBS / "control_machine.py")
    run_alone([script, str(found), str(rounds), *listed], work, timeout_s=SCRIPT_LIMIT_S)
    measured = msgspec.json.decode(found.read_bytes(), type=MachineMeasurements)
    return PartResult(samples=make_machine_samples(measured))


def _join(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes)) or "-"


def _tabulate(figures: Mapping[str, Figure]) -> Table:
    table = Table("figure", title=describe_machine())
    for name in ("median", "spread", "n", "aim"):
        table.add_column(name, justify="right")
    for key, figure in figures.items():
        spread = f"{figure.low:g} to {figure.high:g}"
        table.add_row(key, f"{figure.median:g}", spread, str(figure.n), AIMS.get(key, ""))
    return table
