"""Published step times of one model in many layouts, beside the planner's estimates. Pure but for its data files.

`published_layouts.csv` has the rows of two sources, as published; a row that was measured twice has the mean.

a100: Hagemann et al. 2023 (https://arxiv.org/abs/2311.05610), data/*.xlsx of GitHub's
Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts at e13c2cb5: tensor, pipeline, microbatch, with
and without recomputation, on 32 to 256 A100. Runs that recompute have FlashAttention-2, others an RMS norm kernel as
well. Runs marked as having Megatron's sequence parallelism are left out. The shapes are those of Llama 1 with 128,000
tokens in the vocabulary, as the published MFU implies. That the hosts are DGX A100 is recalled from the paper.

h100: MosaicML, scripts/train/benchmarking/README.md of GitHub's mosaicml/llm-foundry at 49521837: MPT from 1B to 70B
with FSDP on 8 to 512 H100, bf16, sequences of 512 to 65,536 tokens. The links are not published: those of
meshes/h100_2048x8.toml are assumed.

What a source does otherwise than our programs: pipelines are 1F1B; memory, see `figures.remove_memory_limit`. PyTorch
launches kernels one by one and fuses less. So constants are fitted to each source, to half of its models, and the
errors of the other half say how good the model is. They are kept in `published_*.calibration.toml`: a fit takes
minutes (`python tests/benchmarks plan --fit`).
"""

import csv
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration, load_calibration
from resilient_jax.planning.calibration_fit import FITTED_CONSTANTS, StepMeasurement, fit_calibration
from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.pipeline import time_pipeline
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_request import PlanConstraints
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.transformer import TransformerShape
from resilient_jax.planning.transformer_cost import analyze_transformer
from resilient_jax.topology import Port, Topology, load_topology
from tests.benchmarks.paths import REPOSITORY
from tests.benchmarks.plan.estimate_errors import (
    GridCorrelation,
    LayoutRatios,
    PublishedFigures,
    RatioFigures,
    correlate_ranks,
)
from tests.benchmarks.plan.figures import DEVICES_PER_HOST, make_topology, remove_memory_limit
from tests.support.plan_searches import search_plans

LAYOUTS_FILE: Final = Path(__file__).with_name("published_layouts.csv")
A100, H100 = "a100", "h100"
SHAPES: Final = {
    "llama_13b": (40, 5120, 40, 13_824),
    "llama_30b": (60, 6656, 52, 17_920),
    "llama_65b": (80, 8192, 64, 22_016),
    "mpt_1b": (24, 2048, 16, 8192),
    "mpt_3b": (32, 2560, 20, 10_240),
    "mpt_7b": (32, 4096, 32, 16_384),
    "mpt_13b": (40, 5120, 40, 20_480),
    "mpt_30b": (48, 7168, 56, 28_672),
    "mpt_70b": (80, 8192, 64, 32_768),
}
"""Layers, width, heads, feed-forward."""
DEVELOPMENT_MODELS: Final = frozenset({"llama_13b", "mpt_1b", "mpt_7b", "mpt_30b"})
"""Models that constants are fitted to; figures are of the others."""
CONSTANTS: Final = ("attention_efficiency", "fsdp_overlap", *FITTED_CONSTANTS)
LEAST_ROWS: Final = 8
"""A grid of fewer layouts has no meaningful rank correlation."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A published step: columns of `published_layouts.csv`.

    Attributes:
        family: of the two sources.
        model: key of `SHAPES`.
        devices: of all hosts.
        tokens, batch: tokens of a sequence, sequences of a step.
        tensor, pipeline, fsdp: sizes of the axes; the rest of the devices are replicas.
        sequences, remat: of a microbatch on a device, and whether it recomputes its layers.
        step_s: published.
    """

    family: str
    model: str
    devices: int
    tokens: int
    batch: int
    tensor: int
    pipeline: int
    fsdp: int
    sequences: int
    remat: bool
    step_s: float

    @property
    def name(self) -> str:
        """The layout in words."""
        parts = [f"{axis} {getattr(self, axis)}" for axis in ("tensor", "pipeline", "fsdp")]
        microbatch = f"microbatch {self.sequences} of {self.tokens} tokens"
        return ", ".join([*parts, microbatch, *["remat"] * self.remat])

    @property
    def grid(self) -> str:
        """The grid that it is ranked in: same model, and on A100 the same sequences and devices."""
        if self.family == H100:
            return f"{self.model} on H100"
        return f"{self.model}, {self.tokens} tokens, on {self.devices} A100"


class LayoutEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A published step in seconds, and its estimates with the assumed and with the fitted constants."""

    layout: Layout
    assumed_s: float
    fitted_s: float


def read_layouts(path: Path = LAYOUTS_FILE) -> tuple[Layout, ...]:
    """Return the published layouts, in the order of the file."""
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(msgspec.convert(row, Layout, strict=False) for row in csv.DictReader(file))


def compare_layouts(layouts: Sequence[Layout], *, is_fitted_anew: bool = False) -> PublishedFigures:
    """Return the figures of published layouts, each estimated with assumed constants and with those of its source.

    Args:
        layouts: of one or both sources.
        is_fitted_anew: whether to fit the constants, which takes minutes, or to read those that were fitted before.
    """
    estimates: list[LayoutEstimate] = []
    constants = {}
    for family in dict.fromkeys(layout.family for layout in layouts):
        plans = [(layout, make_plan(layout)) for layout in layouts if layout.family == family]
        fitted = fit_constants(plans) if is_fitted_anew else load_constants(family)
        constants[family] = {name: round(getattr(fitted, name), 9) for name in CONSTANTS}
        estimates += [
            LayoutEstimate(
                layout=layout,
                assumed_s=estimate_layout_s(plan, Calibration()),
                fitted_s=estimate_layout_s(plan, fitted),
            )
            for layout, plan in plans
        ]
    return PublishedFigures(
        published_ratio=summarize_ratios(estimates),
        published_rank_correlation=correlate_grids(estimates),
        published_constants=constants,
        published_layouts={
            grid: {
                one.layout.name: (one.layout.step_s, round(one.assumed_s, 3), round(one.fitted_s, 3))
                for one in rows
            }
            for grid, rows in _group(estimates).items()
        },
    )


def load_constants(family: str) -> Calibration:
    """Return the constants that were fitted to the development models of a source."""
    return load_calibration(LAYOUTS_FILE.with_name(f"published_{family}.calibration.toml"))


def fit_constants(plans: Iterable[tuple[Layout, Plan]]) -> Calibration:
    """Return the constants fitted to the development models."""
    measurements = [
        StepMeasurement(plan=plan, step_s=layout.step_s)
        for layout, plan in plans
        if layout.model in DEVELOPMENT_MODELS
    ]
    return fit_calibration(
        measurements, Calibration(), constants=CONSTANTS, estimate=estimate_layout_s
    ).calibration


def summarize_ratios(estimates: Sequence[LayoutEstimate]) -> dict[str, LayoutRatios]:
    """Return the ratios of each source, over the models that nothing was fitted to."""
    found = {}
    for family in dict.fromkeys(one.layout.family for one in estimates):
        held = [
            one
            for one in estimates
            if one.layout.family == family and one.layout.model not in DEVELOPMENT_MODELS
        ]
        if held:
            found[family] = LayoutRatios(
                n=len(held),
                assumed=_summarize([one.layout.step_s / one.assumed_s for one in held]),
                fitted=_summarize([one.layout.step_s / one.fitted_s for one in held]),
            )
    return found


def _summarize(ratios: Sequence[float]) -> RatioFigures:
    error = math.sqrt(statistics.mean(math.log(ratio) ** 2 for ratio in ratios))
    return RatioFigures(
        least=round(min(ratios), 3),
        median=round(statistics.median(ratios), 3),
        most=round(max(ratios), 3),
        error=round(error, 3),
    )


def _group(estimates: Sequence[LayoutEstimate]) -> dict[str, list[LayoutEstimate]]:
    grids: dict[str, list[LayoutEstimate]] = {}
    for one in estimates:
        grids.setdefault(one.layout.grid, []).append(one)
    return grids


def correlate_grids(estimates: Sequence[LayoutEstimate]) -> dict[str, GridCorrelation]:
    """Return the rank correlation of each grid with enough layouts, of device seconds per token."""

    def rank(rows: Sequence[LayoutEstimate], estimated_s: Sequence[float]) -> float:
        scale = [one.layout.devices / (one.layout.batch * one.layout.tokens) for one in rows]
        published = [one.layout.step_s * factor for one, factor in zip(rows, scale, strict=True)]
        estimated = [step_s * factor for step_s, factor in zip(estimated_s, scale, strict=True)]
        return round(correlate_ranks(estimated, published), 3)

    return {
        grid: GridCorrelation(
            n=len(rows),
            assumed=rank(rows, [one.assumed_s for one in rows]),
            fitted=rank(rows, [one.fitted_s for one in rows]),
            is_fitted=rows[0].layout.model in DEVELOPMENT_MODELS,
        )
        for grid, rows in _group(estimates).items()
        if len(rows) >= LEAST_ROWS
    }


def make_plan(layout: Layout) -> Plan:
    """Return the plan of a published layout, whatever memory it needs."""
    replicas = layout.devices // (layout.tensor * layout.pipeline * layout.fsdp)
    axes = {
        Axis.TENSOR: layout.tensor,
        Axis.SEQUENCE: 1,
        Axis.EXPERT: 1,
        Axis.FSDP: layout.fsdp,
        Axis.PIPELINE: layout.pipeline,
        Axis.REPLICA: replicas,
    }
    (plan,) = search_plans(
        make_program_cost(layout.model, layout.tokens),
        make_cluster(layout.family, layout.devices // DEVICES_PER_HOST),
        global_batch=layout.batch,
        constraints=PlanConstraints(axes, MicrobatchConfig(layout.sequences, layout.remat)),
    )
    return plan


def make_program_cost(model: str, tokens: int) -> ProgramCost:
    """Return the cost of a model of `SHAPES` with sequences of so many tokens."""
    layers, width, heads, feed_forward = SHAPES[model]
    is_llama = model.startswith("llama")
    shape = TransformerShape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        feed_forward=feed_forward,
        vocabulary_tokens=128_000 if is_llama else 50_368,
        sequence_tokens=tokens,
        gated=is_llama,
        norm="rms" if is_llama else "layer",
        biases="none",
        positions="rotary" if is_llama else "table",
        tied_embedding=not is_llama,
    )
    return analyze_transformer(shape, name=model)


def make_cluster(family: str, hosts: int) -> Topology:
    """Return hosts of DGX A100, each GPU with a network adapter of 200 Gb/s, or of H100 with 400 Gb/s."""
    if family == H100:
        return remove_memory_limit(make_topology(REPOSITORY / "meshes/h100_2048x8.toml", hosts))
    known = load_topology(REPOSITORY / "meshes/a100_32x8.toml")
    # The file reads its paper as one adapter for a host; a DGX A100 has one for each GPU.
    network = dataclasses.replace(known.levels[1], port=Port.DEVICE)
    like = known.hosts[0]
    made = (dataclasses.replace(like, name=HostName(f"host-{number:02}")) for number in range(hosts))
    return remove_memory_limit(
        dataclasses.replace(known, levels=(known.levels[0], network), hosts=tuple(made))
    )


def estimate_layout_s(plan: Plan, calibration: Calibration) -> float:
    """Return the step time of a plan as a program with 1F1B pipelines runs it."""
    # N t + (P - 1) (t + 2 x) + all-reduce + update, in s: our own schedule with no weight gradient to fill a gap.
    cost_model = CostModel(dataclasses.replace(plan.request, calibration=calibration))
    (block,) = cost_model.find_block_classes(plan.layout, plan.microbatch)
    stage_s = block.time.slowest_stage.total_s
    fill_s = time_pipeline(plan.layout.axes.pipeline, stage_s, block.time.transfer_s, weight_share=0.0).fill_s
    reduction_s, update_s = cost_model.estimate_reduction_and_update_s(plan.layout, (block,), plan.blocks)
    quota = math.ceil(plan.microbatches / plan.replicas)
    return float(quota * stage_s + fill_s + reduction_s + update_s)
