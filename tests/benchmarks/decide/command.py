"""The decide benchmark: the speed that plans keep after losses, and the time to find them."""

import statistics
import time
from typing import Annotated

import typer
from rich.table import Table

from resilient_jax.errors import CallerError
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search import search_plan
from tests.benchmarks.decide.decision_time import AIM_MS, DECISION_HOSTS, measure_decision_ms
from tests.benchmarks.decide.drawn_changes import DrawnFigures, judge_drawn_changes
from tests.benchmarks.decide.figures import (
    DEVICES_PER_HOST,
    FEW_SEQUENCES_PER_DEVICE,
    LOSS_CASES,
    SEQUENCES_PER_DEVICE,
    DecideFigures,
    KeptSpeed,
    LossCase,
    lose_devices,
    measure_kept_speed,
)
from tests.benchmarks.paths import REPOSITORY
from tests.benchmarks.plan.command import MESH, analyze_model, measure_programs, tabulate_programs
from tests.benchmarks.plan.estimate_errors import make_program_figures
from tests.benchmarks.plan.figures import SEARCH_CASES, SearchCase, make_topology
from tests.benchmarks.report import describe_machine, open_console, print_json_line

MODEL = "llama2_7b"
DRAWN_CHANGES = 10_000
AIMS_MS = {1024: 50, 16_384: 300, 131_072: 2000}


def decide(
    rounds: Annotated[int, typer.Option(help="Times that each search is timed.")] = 3,
    programs: Annotated[bool, typer.Option(help="Compile and time real programs of plans.")] = True,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Measure what plans keep of the speed when devices are lost, and the time of a search.

    Llama 2 7B on hosts of meshes/h100_2048x8.toml. The keys of the line of JSON:

    kept_K_of_N: speed after K of N devices were lost, as a part of that before;
    64 sequences a device. kept_K_of_N_equal: of equal replicas alone.

    kept_K_of_N_few_sequences: the same with 8 sequences a device.

    search_ms_N: processor time of the search for a plan for N devices, of which
    none is lost; median. search_wall_ms_N: until it returned.

    decision_ms: processor time of a leader's decision at a change of members,
    of 4,096 hosts; the slower of two, median.

    decision_regret: work until the next failure that a leader's choices miss, of
    the best option in hindsight; drawn changes of members. policy_gain_at_once,
    policy_gain_waiting: over going on at once with the fastest plan, and over
    waiting, each time. policy_gain_rerouting: in pipelines, over keeping the
    lost stage each time.

    regret, rank_correlation, estimate_error, estimate_error_calibrated: as of
    the plan benchmark, which says what they are; --no-programs leaves them out.
    n: rounds.
    """
    if rounds < 1:
        raise CallerError(f"decide: found --rounds {rounds}, expected 1 or more")
    console = open_console(json_only)
    figures = DecideFigures(machine=describe_machine(), n=rounds)
    cost = analyze_model(MODEL)
    for case in LOSS_CASES:
        figures.kept[case.key] = _measure_loss(cost, case, SEQUENCES_PER_DEVICE)
        figures.kept_few[case.key] = _measure_loss(cost, case, FEW_SEQUENCES_PER_DEVICE)
        console.print(f"{case.key}: {figures.kept[case.key].shape}")
    for search in SEARCH_CASES:
        if search.devices in AIMS_MS:
            _time_search(figures, search, rounds)
    figures.drawn = judge_drawn_changes(DRAWN_CHANGES)
    figures.decision_ms = statistics.median(measure_decision_ms(DECISION_HOSTS) for _ in range(rounds))
    if programs:
        console.print("all plans of four models on eight CPU devices")
        figures.programs = make_program_figures(measure_programs())
        console.print(tabulate_programs(figures.programs))
    console.print(_tabulate_kept(figures))
    console.print(_tabulate_searches(figures))
    console.print(_tabulate_drawn(figures.drawn))
    console.print(f"a decision of {DECISION_HOSTS} hosts: {figures.decision_ms:.2f} ms, aim {AIM_MS:g} ms")
    print_json_line(figures.line())


def _measure_loss(cost: ProgramCost, case: LossCase, sequences: int) -> KeptSpeed:
    full = make_topology(REPOSITORY / MESH, case.devices // DEVICES_PER_HOST)
    before = search_plan(cost, full, global_batch=case.devices * sequences)
    return measure_kept_speed(cost, before, lose_devices(full, case.lost))


def _time_search(figures: DecideFigures, case: SearchCase, rounds: int) -> None:
    cost, topology = analyze_model(case.model), make_topology(REPOSITORY / MESH, case.hosts)
    wall, processor = [], []
    for _ in range(rounds):
        started, used = time.perf_counter(), time.process_time()
        search_plan(cost, topology, global_batch=case.global_batch)
        wall.append(1e3 * (time.perf_counter() - started))
        processor.append(1e3 * (time.process_time() - used))
    figures.search_ms[f"search_ms_{case.devices}"] = statistics.median(processor)
    figures.search_wall_ms[f"search_wall_ms_{case.devices}"] = statistics.median(wall)


def _tabulate_kept(figures: DecideFigures) -> Table:
    table = Table("", "best plan", title=f"{MODEL}, {figures.machine}")
    for name in ("kept", "aim", "equal replicas", f"{FEW_SEQUENCES_PER_DEVICE} sequences a device"):
        table.add_column(name, justify="right")
    for case in LOSS_CASES:
        kept, few = figures.kept[case.key], figures.kept_few[case.key]
        table.add_row(
            case.key,
            kept.shape,
            f"{kept.best:.3f}",
            f"{case.aim:.3f}",
            f"{kept.equal:.3f}",
            f"{few.best:.3f}",
        )
    return table


def _tabulate_drawn(found: DrawnFigures) -> Table:
    table = Table("figure", "found", "aim", title=f"{found.changes} drawn changes of members")
    table.add_row("decision_regret", f"{found.decision_regret:.5f}", "0.03")
    table.add_row("policy_gain_at_once", f"{found.policy_gain_at_once:.5f}", "")
    table.add_row("policy_gain_rerouting", f"{found.policy_gain_rerouting:.5f}", "")
    table.add_row("policy_gain_waiting", f"{found.policy_gain_waiting:.5f}", "")
    table.add_row("share of changes in which it waits", f"{found.waits:.3f}", "")
    return table


def _tabulate_searches(figures: DecideFigures) -> Table:
    table = Table("devices", title=f"searches, n = {figures.n}")
    for name in ("processor", "until done", "aim"):
        table.add_column(name, justify="right")
    for devices, aim in AIMS_MS.items():
        processor = figures.search_ms.get(f"search_ms_{devices}")
        wall = figures.search_wall_ms.get(f"search_wall_ms_{devices}")
        if processor is not None and wall is not None:
            table.add_row(str(devices), f"{processor:.0f} ms", f"{wall:.0f} ms", f"{aim} ms")
    return table
