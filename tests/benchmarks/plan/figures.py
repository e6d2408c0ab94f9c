"""Searches, published runs and figures of the plan benchmark. Pure."""

import dataclasses
from pathlib import Path

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.model_file import ModelShape
from resilient_jax.planning.plan_request import PlanConstraints
from resilient_jax.planning.transformer_cost import analyze_transformer
from resilient_jax.topology import Topology, load_topology
from tests.benchmarks.plan.estimate_errors import ProgramFigures, PublishedFigures
from tests.benchmarks.plan.program_stall import ProgramStall
from tests.support.plan_searches import search_plans

DEVICES_PER_HOST = 8
RACK_HOSTS, POD_HOSTS = 2, 384
ENOUGH_MEMORY = 1000
"""How many times the memory of its data sheet a device has where memory is not to limit plans."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchCase:
    """Model, global batch size and number of hosts of a search to time."""

    hosts: int
    model: str
    global_batch: int

    @property
    def devices(self) -> int:
        """Number of devices of all hosts."""
        return self.hosts * DEVICES_PER_HOST


SEARCH_CASES = (
    SearchCase(hosts=8, model="llama3_8b", global_batch=256),
    SearchCase(hosts=128, model="llama3_70b", global_batch=2048),
    SearchCase(hosts=2048, model="llama3_405b", global_batch=2048),
    SearchCase(hosts=16_384, model="llama3_405b", global_batch=16_384),
)
"""Models that fit, each with about as many sequences per step as a job of that size has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A run whose parallelism and MFU were published.

    Attributes:
        name: for tables.
        model: name of a file in `configs/`.
        hosts: number of hosts with 8 H100 each.
        sequence_tokens, global_batch: tokens per sequence, and sequences per step.
        axes: as published; the search chooses the data-parallel rest. A microbatch is one sequence, and no layer is
            recomputed.
        rounds: pipeline repeats, the chunks of layers on each stage.
        mfu: published.
        source: of the publication.
    """

    name: str
    model: str
    hosts: int
    sequence_tokens: int
    global_batch: int
    axes: tuple[tuple[Axis, int], ...]
    rounds: int
    mfu: float
    source: str


def _train_llama3_405b(
    *, hosts: int, mfu: float, sequences: int = 2048, tokens: int = 8192, sequence: int = 1
) -> PublishedRun:
    """Return a row of the published table; all rows have tensor 8 and pipeline 16.

    The schedule is interleaved, with an unpublished number of chunks per stage. Seven are assumed: 126 layers on 16
    stages in chunks of one or two.
    """
    long = f", sequences of {tokens:,}" if sequence > 1 else ""
    return PublishedRun(
        name=f"Llama 3 405B on {hosts * DEVICES_PER_HOST:,} H100{long}",
        model="llama3_405b",
        hosts=hosts,
        sequence_tokens=tokens,
        global_batch=sequences,
        axes=((Axis.TENSOR, 8), (Axis.PIPELINE, 16), (Axis.SEQUENCE, sequence)),
        rounds=7,
        mfu=mfu,
        source="arXiv 2407.21783, table 4",
    )


PUBLISHED_RUNS = (
    _train_llama3_405b(hosts=1024, mfu=0.43),
    _train_llama3_405b(hosts=2048, mfu=0.41),
    _train_llama3_405b(hosts=2048, mfu=0.38, sequences=128, tokens=131_072, sequence=16),
)


class RunEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A published run beside its estimate; `error` is estimated / published - 1."""

    name: str
    plan: str
    published_mfu: float
    estimated_mfu: float
    error: float
    source: str


@dataclasses.dataclass(slots=True, kw_only=True)
class PlanFigures:
    """All measurements of the benchmark."""

    machine: str
    n: int
    times_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    memory_mib: dict[str, float] = dataclasses.field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    published: list[RunEstimate] = dataclasses.field(default_factory=list)
    programs: ProgramFigures | None = None
    layouts: PublishedFigures | None = None
    stalls: dict[str, ProgramStall] = dataclasses.field(default_factory=dict)
    """By key of the line of JSON."""

    def line(self) -> msgspec.Struct:
        """Return the line of JSON, in which each time and each memory has a key of its own."""
        numbers = {key: round(number, 1) for key, number in (self.times_ms | self.memory_mib).items()}
        fields = {
            **numbers,
            "spread": self.spread,
            "published": self.published,
            **(msgspec.structs.asdict(self.layouts) if self.layouts else {}),
            **(msgspec.structs.asdict(self.programs) if self.programs else {}),
            **{key: round(found.programs_s, 3) for key, found in self.stalls.items()},
            "n": self.n,
            "machine": self.machine,
        }
        return msgspec.defstruct("PlanLine", list(fields))(**fields)


def describe_case(case: SearchCase) -> str:
    """Return a description of the case for the console."""
    return f"{case.model}, {case.global_batch} sequences in a step, {case.hosts} hosts"


def make_topology(mesh: Path, hosts: int) -> Topology:
    """Return `hosts` hosts like the first of a topology, in racks and pods of the sizes in its file."""
    known = load_topology(mesh)
    like = known.hosts[0]
    made = (
        dataclasses.replace(
            like,
            name=HostName(f"host-{number:05}"),
            domains=(f"rack-{number // RACK_HOSTS}", f"pod-{number // POD_HOSTS}"),
        )
        for number in range(hosts)
    )
    return dataclasses.replace(known, name=f"h100_{hosts}x8", hosts=tuple(made))


def remove_memory_limit(topology: Topology) -> Topology:
    """Return the topology with devices on which every plan fits.

    Published runs divide over a tensor group what our programs keep on each of its devices (Megatron's sequence
    parallelism), and optimizer states over replicas (ZeRO 1).
    """
    hosts = topology.hosts
    roomy = {
        chip: dataclasses.replace(chip, memory_bytes=chip.memory_bytes * ENOUGH_MEMORY)
        for chip in topology.accelerators
    }
    return dataclasses.replace(
        topology, hosts=tuple(dataclasses.replace(one, accelerator=roomy[one.accelerator]) for one in hosts)
    )


def estimate_run(run: PublishedRun, model: ModelShape, topology: Topology) -> RunEstimate:
    """Return the estimate of a published run: the best plan with the published axes, whatever memory it needs.

    It ran, but in a program that shards activations and optimizer states otherwise than ours, see
    `remove_memory_limit`.
    """
    shape = msgspec.structs.replace(model.transformer, sequence_tokens=run.sequence_tokens)
    (found,) = search_plans(
        analyze_transformer(shape, name=model.name),
        remove_memory_limit(topology),
        global_batch=run.global_batch,
        constraints=PlanConstraints(dict(run.axes), MicrobatchConfig(1, remat=False)),
        pipeline_repeats=run.rounds,
    )
    return RunEstimate(
        name=run.name,
        plan=found.shape,
        published_mfu=run.mfu,
        estimated_mfu=round(found.model_flops_utilization, 4),
        error=round(found.model_flops_utilization / run.mfu - 1, 4),
        source=run.source,
    )
