"""The settings of the example with their ranges; `configs/` has good values."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class TextSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text to train on."""

    max_bytes: Annotated[int, Meta(ge=65_536, le=1_000_000_000)]
    """The length of the text, taken from the standard library's sources."""


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network's sizes."""

    width: Annotated[int, Meta(ge=8, le=4_096)]
    layers: Annotated[int, Meta(ge=1, le=64)]
    heads: Annotated[int, Meta(ge=1, le=64)]
    context: Annotated[int, Meta(ge=8, le=4_096)]
    """The length of a sequence, and the span of attention, in bytes."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}")


class OptimizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW with a linear warm-up and then a constant rate, so that no step depends on the number of steps."""

    learning_rate: Annotated[float, Meta(gt=0, le=1)]
    warmup_steps: Annotated[int, Meta(ge=1, le=1_000_000)]
    weight_decay: Annotated[float, Meta(ge=0, le=1)]
    clip_norm: Annotated[float, Meta(gt=0, le=1_000)]
    """The gradient's largest global norm."""


class StateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The placement of parameters and optimizer state between steps."""

    parallelism: Literal["replicated", "sharded"] = "replicated"
    """Replicated on every host, or sharded over all of them; see `rj.Parallelism`."""


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the model is split over hosts."""

    stages: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Hosts of a replica; without a number each host has the whole model."""


class MeshSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the state is in shards on the devices of each replica, which may span hosts."""

    fsdp: Annotated[int, Meta(ge=1, le=4_096)] | None = None
    """Devices of a replica; without a number each device is one, with the whole model."""


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether, and for which topology, the trainer searches a plan."""

    topology: str | None = None
    """The topology's file, relative to that of the settings; without a topology each device is a replica."""
    calibrate: bool = True
    """Fit the planner's constants to the steps of this job."""
    compile_ahead: bool = True
    """Compile the programs of the likely next worlds while training continues."""
    spans_hosts: bool | None = None
    """Make replicas of whole hosts; without it, where no plan inside of hosts fits the memory of devices."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the example."""

    steps: Annotated[int, Meta(ge=1, le=10_000_000)]
    seed: Annotated[int, Meta(ge=0, lt=2**32)]
    microbatches: Annotated[int, Meta(ge=1, le=65_536)]
    """Microbatches of a step, however many hosts share them."""
    sequences: Annotated[int, Meta(ge=1, le=65_536)]
    """Sequences of a microbatch."""
    text: TextSettings
    model: ModelSettings
    optimizer: OptimizerSettings
    state: StateSettings = StateSettings()
    pipeline: PipelineSettings = PipelineSettings()
    mesh: MeshSettings = MeshSettings()
    plan: PlanSettings = PlanSettings()
