"""Training steps under many plans of eight devices: the memory estimate of a device beside XLA's."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import resilient_jax as rj
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.plan_request import PlanConstraints
from resilient_jax.planning.transformer import TransformerShape
from resilient_jax.sharding.planned_program import compile_plan
from tests.benchmarks.plan.estimate_errors import MemoryCase
from tests.support.plan_searches import search_plans
from tests.support.plan_topologies import cluster
from tests.support.planned_programs import LinenProgram, NnxProgram

SHAPES = {
    "deep": TransformerShape(
        layers=4,
        width=128,
        heads=8,
        kv_heads=8,
        head_dim=16,
        feed_forward=384,
        vocabulary_tokens=256,
        sequence_tokens=128,
    ),
    "wide": TransformerShape(
        layers=2,
        width=256,
        heads=8,
        kv_heads=8,
        head_dim=32,
        feed_forward=512,
        vocabulary_tokens=512,
        sequence_tokens=64,
    ),
}
"""First 3.7 MB of parameters and 12 to 15 MB of activations per sequence, then 6.3 MB and 4 to 5 MB."""
KINDS = {"nnx": NnxProgram, "linen": LinenProgram}
R, F, T, S = Axis.REPLICA, Axis.FSDP, Axis.TENSOR, Axis.SEQUENCE
MESHES = {
    "replica 8": {R: 8},
    "fsdp 8": {F: 8},
    "sequence 8": {S: 8},
    "tensor 8": {T: 8},
    "tensor 4 x replica 2": {T: 4, R: 2},
    "tensor 2 x fsdp 4": {T: 2, F: 4},
    "tensor 2 x sequence 2 x fsdp 2": {T: 2, S: 2, F: 2},
}


class Case(NamedTuple):
    """One compiled plan; `sequences` is a device's number of sequences in a microbatch."""

    kind: str
    shape: str
    mesh: str
    sequences: int
    remat: bool = False

    @property
    def name(self) -> str:
        """The case in words, for reports and pytest."""
        again = ", remat" if self.remat else ""
        return f"{self.kind} {self.shape}, {self.mesh}, {self.sequences} sequences{again}"


def describe(case: Case) -> str:
    """Return the name of a case as its test id."""
    return case.name


_OF_SHAPE = {
    "deep": [
        ("replica 8", 4, False),
        ("fsdp 8", 4, False),
        ("sequence 8", 4, False),
        ("tensor 8", 4, False),
        ("tensor 2 x sequence 2 x fsdp 2", 4, False),
        ("tensor 2 x fsdp 4", 2, False),
        ("replica 8", 4, True),
        ("fsdp 8", 4, True),
    ],
    "wide": [
        ("replica 8", 4, False),
        ("fsdp 8", 4, False),
        ("tensor 4 x replica 2", 8, False),
        ("tensor 2 x fsdp 4", 4, False),
        ("fsdp 8", 1, False),
    ],
}
GRID = tuple(
    Case(kind, shape, mesh, sequences, again)
    for kind in KINDS
    for shape, rows in _OF_SHAPE.items()
    for mesh, sequences, again in rows
)


@functools.cache
def profile_of(kind: str, shape: str) -> rj.planning.ProgramCost:
    """Return the cost measured from the model and its rematerialized twin, with a batch of four examples."""
    program = KINDS[kind](SHAPES[shape])
    is_asked = any((case.kind, case.shape, case.remat) == (kind, shape, True) for case in GRID)
    again = KINDS[kind](SHAPES[shape], remat=True).model if is_asked else None
    return program.profile(examples=4, remat=again)


def compare(case: Case) -> MemoryCase:
    """Compile the step of a plan, and return the estimate beside what XLA reports."""
    profile, program = (
        profile_of(case.kind, case.shape),
        KINDS[case.kind](SHAPES[case.shape], case.remat),
    )
    axes = dict.fromkeys(Axis, 1) | MESHES[case.mesh]
    examples = case.sequences * axes[Axis.REPLICA] * axes[Axis.FSDP]
    (plan,) = search_plans(
        profile,
        cluster([1.0] * 4, devices=2),
        global_batch=examples,
        constraints=PlanConstraints(axes, MicrobatchConfig(case.sequences, case.remat)),
        calibration=Calibration(staging_bytes=0.0),
        number_format="bf16",
    )
    rows = jax.ShapeDtypeStruct((examples, program.sequence_tokens), jnp.int32)
    compiled = compile_plan(
        plan, program.step, jax.eval_shape(program.init), rows, devices=jax.devices()
    ).compiled
    memory = compiled.memory_analysis()
    assert memory is not None
    measured = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return MemoryCase(
        name=case.name,
        estimated_bytes=plan.memory.total,
        measured_bytes=measured - memory.alias_size_in_bytes,
    )
