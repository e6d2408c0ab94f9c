"""Compile and time plans of eight CPU devices in one process, for the plan benchmark.

    plan_programs.py FOUND ROUNDS

For each of four models, the script compiles the step of every feasible plan without a pipeline and with one microbatch
per replica, and times it in ROUNDS rounds of one step per plan. It fits the constants of the cost model to the first
model, and estimates the plans of the other three with them. Then it does with each of these what a running job does: it
fits the constants to the plans with the least estimates, and estimates the others. It writes `PlanMeasurements` to
FOUND.
"""

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import msgspec

import resilient_jax as rj
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.calibration_fit import (
    JOB_SPREADS,
    StepMeasurement,
    estimate_step_s,
    find_error,
    fit_calibration,
)
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.plan_request import PlanConstraints
from resilient_jax.planning.tensor_partition import find_violated_rules
from resilient_jax.planning.transformer import TransformerShape
from resilient_jax.sharding.planned_program import PlannedProgram, compile_plan
from tests.benchmarks.paths import REPOSITORY
from tests.benchmarks.plan.estimate_errors import (
    CalibratedError,
    MemoryCase,
    PlanMeasurements,
    TimedModel,
    TimedPlan,
)
from tests.support.memory_grid import GRID, KINDS, compare
from tests.support.plan_searches import search_plans

DEVICES = 8
MESH = REPOSITORY / "meshes" / "local_1x8.toml"
PLANS_OF_A_JOB = (1, 2, 4)
START = Calibration(fsdp_overlap=0.0, staging_bytes=0.0)
"""XLA's CPU devices run collectives synchronously, so no communication overlaps with computation."""


class Model(NamedTuple):
    """A model whose plans are timed."""

    name: str
    kind: str
    global_batch: int
    shape: TransformerShape


def _shape(layers: int, width: int, feed_forward: int, vocabulary: int, tokens: int) -> TransformerShape:
    return TransformerShape(
        layers=layers,
        width=width,
        heads=8,
        kv_heads=8,
        head_dim=width // 8,
        feed_forward=feed_forward,
        vocabulary_tokens=vocabulary,
        sequence_tokens=tokens,
    )


CALIBRATED_ON = Model("even, a loop", "linen", 16, _shape(2, 128, 384, 256, 64))
MODELS = (
    Model("parameters, layer by layer", "nnx", 8, _shape(2, 256, 512, 512, 32)),
    Model("attention, layer by layer", "nnx", 8, _shape(2, 64, 256, 128, 256)),
    Model("vocabulary, a loop", "linen", 16, _shape(3, 192, 512, 1024, 64)),
)


class Running(NamedTuple):
    """The compiled program of a plan, with its batch on the devices."""

    plan: rj.planning.Plan
    program: PlannedProgram
    batch: jax.Array


def list_axes(profile: rj.planning.ProgramCost, global_batch: int) -> Iterator[Mapping[Axis, int]]:
    """Yield all sizes of replica, fsdp, tensor and sequence that multiply to `DEVICES` and that the program allows."""
    sizes = [size for size in range(1, DEVICES + 1) if DEVICES % size == 0]
    names = (Axis.REPLICA, Axis.FSDP, Axis.TENSOR, Axis.SEQUENCE)
    for chosen in itertools.product(sizes, repeat=len(names)):
        axes = dict(zip(names, chosen, strict=True))
        if axes[Axis.REPLICA] * axes[Axis.FSDP] * axes[Axis.TENSOR] * axes[Axis.SEQUENCE] != DEVICES:
            continue
        fits = not any(
            find_violated_rules(profile.divisibility_rules, axis, size) for axis, size in axes.items()
        )
        if fits and global_batch % (axes[Axis.REPLICA] * axes[Axis.FSDP]) == 0:
            yield dict.fromkeys(Axis, 1) | axes


def list_plans(profile: rj.planning.ProgramCost, global_batch: int) -> list[rj.planning.Plan]:
    """Return a plan for each of `list_axes`, with one microbatch per replica."""
    topology = rj.planning.load_topology(MESH)
    return [
        search_plans(
            profile,
            topology,
            global_batch=global_batch,
            calibration=START,
            constraints=PlanConstraints(
                axes, MicrobatchConfig(global_batch // (axes[Axis.REPLICA] * axes[Axis.FSDP]))
            ),
        )[0]
        for axes in list_axes(profile, global_batch)
    ]


def time_model(model: Model, rounds: int) -> list[tuple[rj.planning.Plan, list[float], list[float]]]:
    """Return each plan with the wall time and the processor time of its steps, in seconds."""
    made = KINDS[model.kind](model.shape)
    running = []
    for plan in list_plans(made.profile(), model.global_batch):
        batch = made.batch(examples=model.global_batch)
        program = compile_plan(plan, made.step, jax.eval_shape(made.init), batch, devices=jax.devices())
        running.append(Running(plan, program, jax.device_put(batch, program.batch_shardings)))
        print(model.name, plan.shape, f"compiled in {program.compile_s:.1f} s", flush=True)
    state = made.init()
    steps: list[list[float]] = [[] for _ in running]
    used: list[list[float]] = [[] for _ in running]
    for number in range(rounds + 1):
        for (_, program, batch), seconds, processor in zip(running, steps, used, strict=True):
            # A copy, because device_put may return the array itself, and the program would donate the shared state.
            laid = jax.device_put(jax.tree.map(lambda leaf: leaf.copy(), state), program.state_shardings)
            jax.block_until_ready(laid)
            started, before = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(laid, batch))
            if number:  # the first step is slower: it touches new memory
                seconds.append(time.perf_counter() - started)
                processor.append(time.process_time() - before)
    return [
        (one.plan, seconds, processor) for one, seconds, processor in zip(running, steps, used, strict=True)
    ]


def compare_model(model: Model, rounds: int, constants: Calibration) -> TimedModel:
    """Time all plans of a model, and estimate them with `constants`."""
    timed = time_model(model, rounds)
    measured = [StepMeasurement(plan=plan, step_s=statistics.median(seconds)) for plan, seconds, _ in timed]
    measured.sort(key=lambda one: estimate_step_s(one.plan, START))
    return TimedModel(
        name=model.name,
        error_given=find_error(measured, START),
        errors_calibrated=[calibrate(measured[:count], measured[count:]) for count in PLANS_OF_A_JOB],
        plans=[
            TimedPlan(
                plan=plan.shape,
                estimated_s=estimate_step_s(plan, constants),
                step_s=statistics.median(seconds),
                cpu_s=statistics.median(processor),
                halves_s=(statistics.median(seconds[::2]), statistics.median(seconds[1::2] or seconds)),
            )
            for plan, seconds, processor in timed
        ],
    )


def calibrate(ran: list[StepMeasurement], others: list[StepMeasurement]) -> CalibratedError:
    """Return how far off a job's estimates of other plans are when it has run these."""
    fit = fit_calibration(ran, START, spreads=JOB_SPREADS)
    return CalibratedError(plans=len(ran), error=find_error(others, fit.calibration))


def measure(rounds: int) -> PlanMeasurements:
    """Return the memory of all grid cases, and the timed and estimated plans of all models."""
    memory: list[MemoryCase] = [compare(case) for case in GRID]
    timed = time_model(CALIBRATED_ON, rounds)
    fit = fit_calibration(
        [StepMeasurement(plan=plan, step_s=statistics.median(s)) for plan, s, _ in timed], START
    )
    return PlanMeasurements(
        memory=memory,
        models=[compare_model(model, rounds, fit.calibration) for model in MODELS],
        calibrated_on=CALIBRATED_ON.name,
        calibration=dataclasses.asdict(fit.calibration),
        fit_error=fit.error,
        rounds=rounds,
    )


if __name__ == "__main__":
    found, rounds = sys.argv[1:]
    Path(found).write_bytes(msgspec.json.encode(measure(int(rounds))))
