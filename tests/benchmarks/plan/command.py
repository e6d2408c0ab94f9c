"""The plan benchmark: search time, and errors of the estimates against published runs and measured steps."""

import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from resilient_jax.errors import CallerError
from resilient_jax.planning.model_file import load_model_shape
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search import search_plan
from resilient_jax.planning.transformer_cost import analyze_transformer
from resilient_jax.topology import Topology
from tests.benchmarks.paths import JOBS, REPOSITORY
from tests.benchmarks.plan.estimate_errors import (
    PlanMeasurements,
    ProgramFigures,
    PublishedFigures,
    make_program_figures,
)
from tests.benchmarks.plan.figures import (
    PUBLISHED_RUNS,
    SEARCH_CASES,
    PlanFigures,
    SearchCase,
    describe_case,
    estimate_run,
    make_topology,
)
from tests.benchmarks.plan.program_stall import ProgramStall, measure_program_stall
from tests.benchmarks.plan.published_layouts import compare_layouts, read_layouts
from tests.benchmarks.report import describe_machine, open_console, print_json_line
from tests.benchmarks.runs import run_alone

AIMS_MS = {64: 10, 1024: 50, 16_384: 300, 131_072: 2000}
PROGRAMS_LIMIT_S = 3600.0
"""To compile and time eighty programs: ten minutes on two idle cores, longer on busy ones."""
STEP_ROUNDS = 40
"""Times that the step of each plan is timed, in turn. With ten of them the order of plans that differ by some percent
is that of the machine's load."""
STALLS = {"compile_in_stall_s": True, "compile_in_stall_uncached_s": False}
"""Keys of the line of JSON, and whether programs are compiled ahead."""
MESH = "meshes/h100_2048x8.toml"
LAYOUTS = read_layouts()


def plan(
    rounds: Annotated[int, typer.Option(help="Times that each search is timed.")] = 3,
    programs: Annotated[bool, typer.Option(help="Compile and time real programs of plans.")] = True,
    job: Annotated[bool, typer.Option(help="Kill a worker of a planned job, twice.")] = True,
    fit: Annotated[bool, typer.Option(help="Fit constants to published layouts anew: minutes.")] = False,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Measure search time, errors of the estimates, and how long a stall waits for programs.

    Hosts of meshes/h100_2048x8.toml, in as many pods as needed. The keys of the
    line of JSON, for N devices:

    search_ms_N: until the best plan is found, all hosts healthy; median.

    search_after_ms_N: the same with one host lost and another at speed 0.6.

    search_cpu_ms_N, search_after_cpu_ms_N: processor time, which depends less
    on the load of the machine.

    search_mib_N: peak memory that one search allocates.

    published: for each run its published MFU, the estimate, and the error.

    published_ratio: published over estimated step time of many layouts on A100
    and H100, with the assumed constants and with constants fitted to other
    models of the source. published_rank_correlation: of each grid of layouts.
    published_layouts: of each layout the published seconds and both estimates.

    memory_error: largest and median relative error of the memory of a device,
    over a grid of real training steps compiled for eight CPU devices.

    regret, rank_correlation: all feasible plans of three models run on eight
    CPU devices; of the worst model, the regret of the plan with the least
    estimate, and the rank correlation. The constants are fitted to a fourth
    model. models: each of the three, by step time and by processor time.

    estimate_error, estimate_error_calibrated: of the same plans, how far off
    (root mean square of the logarithm) the constants are that a job is given,
    and those that it has fitted to the four plans with the least estimates,
    of the other plans.

    compile_in_stall_s, compile_in_stall_uncached_s: how long the first step
    after a kill that changed the plan waited for programs, compiled ahead and
    kept on disk, or neither. --no-job leaves them out.

    spread: least and most of each time. n: rounds. programs_n: rounds in which
    programs were timed. --no-programs leaves out the measurements that compile
    programs, which take a quarter of an hour on two idle cores.
    """
    if rounds < 1:
        raise CallerError(f"plan: found --rounds {rounds}, expected 1 or more")
    console = open_console(json_only)
    mesh = REPOSITORY / MESH
    figures = PlanFigures(machine=describe_machine(), n=rounds)
    for case in SEARCH_CASES:
        profile = analyze_model(case.model)
        healthy = make_topology(mesh, case.hosts)
        changed = healthy.without(healthy.hosts[3].name).slowed(healthy.hosts[5].name, 0.6)
        for name, topology in (("search", healthy), ("search_after", changed)):
            _measure(figures, f"{name}_ms_{case.devices}", profile, topology, case, rounds)
        figures.memory_mib[f"search_mib_{case.devices}"] = _measure_memory(profile, changed, case)
        console.print(f"{case.devices} devices: {describe_case(case)}")
    for run in PUBLISHED_RUNS:
        shape = load_model_shape(REPOSITORY / f"configs/{run.model}.toml")
        figures.published.append(estimate_run(run, shape, make_topology(mesh, run.hosts)))
    figures.layouts = compare_layouts(LAYOUTS, is_fitted_anew=fit)
    if programs:
        console.print("all plans of four models on eight CPU devices")
        figures.programs = make_program_figures(measure_programs())
        console.print(tabulate_programs(figures.programs))
    if job:
        figures.stalls = _measure_stalls(console)
        console.print(_tabulate_stalls(figures.stalls))
    console.print(_tabulate_times(figures))
    console.print(_tabulate_published(figures))
    console.print(_tabulate_ratios(figures.layouts))
    console.print(_tabulate_grids(figures.layouts))
    print_json_line(figures.line())


def analyze_model(model: str) -> ProgramCost:
    """Return the cost of a model in `configs/`."""
    shape = load_model_shape(REPOSITORY / f"configs/{model}.toml")
    return analyze_transformer(shape.transformer, name=shape.name)


def _measure(
    figures: PlanFigures, key: str, profile: ProgramCost, topology: Topology, case: SearchCase, rounds: int
) -> None:
    wall, processor = [], []
    for _ in range(rounds):
        started, used = time.perf_counter(), time.process_time()
        search_plan(profile, topology, global_batch=case.global_batch)
        wall.append(1e3 * (time.perf_counter() - started))
        processor.append(1e3 * (time.process_time() - used))
    figures.times_ms[key] = statistics.median(wall)
    figures.times_ms[key.replace("_ms_", "_cpu_ms_")] = statistics.median(processor)
    figures.spread[key] = (min(wall), max(wall))


def _measure_memory(profile: ProgramCost, topology: Topology, case: SearchCase) -> float:
    tracemalloc.start()
    search_plan(profile, topology, global_batch=case.global_batch)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most / 2**20


def measure_programs() -> PlanMeasurements:
    """Run the script that compiles and times programs, in a process of its own with eight devices.

    Raises:
        InternalError: the script failed.
    """
    script = JOBS / "plan_programs.py"
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        found = Path(folder) / "found.json"
        environment = {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "JAX_PLATFORMS": "cpu",
        }
        run_alone([str(script), str(found), str(STEP_ROUNDS)], Path(folder), environment, PROGRAMS_LIMIT_S)
        return msgspec.json.decode(found.read_bytes(), type=PlanMeasurements)


def _measure_stalls(console: Console) -> dict[str, ProgramStall]:
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        return {
            key: measure_program_stall(Path(folder) / key, console, is_cached=is_cached)
            for key, is_cached in STALLS.items()
        }


def _tabulate_stalls(stalls: Mapping[str, ProgramStall]) -> Table:
    table = Table(
        "programs", "plan", title="a worker killed in the reduction; seconds on the slowest host, n = 1"
    )
    for name in ("waited for programs", "compiled", "stall"):
        table.add_column(name, justify="right")
    for key, found in stalls.items():
        table.add_row(
            "compiled ahead" if STALLS[key] else "compiled when needed",
            f"{found.before} -> {found.after}",
            f"{found.programs_s:.2f} s",
            str(found.compiled),
            f"{found.stall.total_s:.2f} s",
        )
    return table


def tabulate_programs(figures: ProgramFigures) -> Table:
    """Return the table of the models whose plans were run."""
    title = f"memory_error {figures.memory_error}, constants from {figures.calibrated_on!r}"
    table = Table("model", "plans", "chosen", "best", title=title)
    for name in (
        "regret",
        "rank correlation",
        "of two halves",
        "by processor time",
        "",
        "error",
        "calibrated",
    ):
        table.add_column(name, justify="right")
    for model in figures.models:
        table.add_row(
            model.name,
            str(model.plans),
            model.chosen,
            model.best,
            f"{model.regret:.1%}",
            f"{model.rank_correlation:.2f}",
            f"{model.repeatability:.2f}",
            f"{model.regret_cpu:.1%}",
            f"{model.rank_correlation_cpu:.2f}",
            f"{model.estimate_error:.3f}",
            ", ".join(f"{plans}: {error:.3f}" for plans, error in model.estimate_errors_calibrated.items()),
        )
    return table


def _tabulate_times(figures: PlanFigures) -> Table:
    table = Table("devices", title=f"{figures.machine}, n = {figures.n}")
    for name in ("search", "processor", "after a failure", "processor", "aim", "memory"):
        table.add_column(name, justify="right")
    for devices, aim in AIMS_MS.items():
        times = [
            figures.times_ms[f"{name}_ms_{devices}"]
            for name in ("search", "search_cpu", "search_after", "search_after_cpu")
        ]
        memory = figures.memory_mib[f"search_mib_{devices}"]
        table.add_row(str(devices), *(f"{t:.0f} ms" for t in times), f"{aim} ms", f"{memory:.0f} MiB")
    return table


def _tabulate_published(figures: PlanFigures) -> Table:
    table = Table("run", "published MFU", "estimated", "error", "source", title="published runs")
    for run in figures.published:
        table.add_row(
            run.name, f"{run.published_mfu:.0%}", f"{run.estimated_mfu:.1%}", f"{run.error:+.0%}", run.source
        )
    return table


def _tabulate_ratios(figures: PublishedFigures) -> Table:
    table = Table(
        "source", "layouts", title="published / estimated time, of models that nothing was fitted to"
    )
    for constants in ("assumed", "fitted"):
        for name in ("least", "median", "most", "error"):
            table.add_column(f"{constants}: {name}", justify="right")
    for source, found in figures.published_ratio.items():
        cells = [
            f"{number:.2f}"
            for one in (found.assumed, found.fitted)
            for number in (one.least, one.median, one.most, one.error)
        ]
        table.add_row(source, str(found.n), *cells)
    return table


def _tabulate_grids(figures: PublishedFigures) -> Table:
    table = Table("grid", "layouts", title="rank correlation of published and estimated times")
    for name in ("assumed", "fitted", "fitted to it"):
        table.add_column(name, justify="right")
    for grid, found in figures.published_rank_correlation.items():
        table.add_row(
            grid,
            str(found.n),
            f"{found.assumed:.2f}",
            f"{found.fitted:.2f}",
            "yes" if found.is_fitted else "no",
        )
    return table
