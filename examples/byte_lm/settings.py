"""The settings of the example, with the range of each; `configs/` holds good ones."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class TextSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text to train on."""

    max_bytes: Annotated[int, Meta(ge=65_536, le=1_000_000_000)]
    """How much of the standard library's sources to learn from."""


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network's sizes."""

    width: Annotated[int, Meta(ge=8, le=4_096)]
    layers: Annotated[int, Meta(ge=1, le=64)]
    heads: Annotated[int, Meta(ge=1, le=64)]
    context: Annotated[int, Meta(ge=8, le=4_096)]
    """Length of a sequence, and how far attention looks back, in bytes."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}")


class OptimizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW, with a linear warm-up and then a constant rate: no step depends on how many will follow."""

    learning_rate: Annotated[float, Meta(gt=0, le=1)]
    warmup_steps: Annotated[int, Meta(ge=1, le=1_000_000)]
    weight_decay: Annotated[float, Meta(ge=0, le=1)]
    clip_norm: Annotated[float, Meta(gt=0, le=1_000)]
    """The gradient's largest global norm."""


class StateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How parameters and optimizer state are kept between steps."""

    parallelism: Literal["replicated", "sharded"] = "replicated"
    """On every host, or sharded over all of them; see `rj.Parallelism`."""


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the trainer searches how to use the hosts' devices."""

    topology: str | None = None
    """The file of the topology, beside the settings; without it each device is a replica."""
    compile_ahead: bool = True
    """Compile the programs of the likely next worlds while training goes on."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the example."""

    steps: Annotated[int, Meta(ge=1, le=10_000_000)]
    seed: Annotated[int, Meta(ge=0, lt=2**32)]
    microbatches: Annotated[int, Meta(ge=1, le=65_536)]
    """In each step, however many hosts share them."""
    sequences: Annotated[int, Meta(ge=1, le=65_536)]
    """In a microbatch."""
    text: TextSettings
    model: ModelSettings
    optimizer: OptimizerSettings
    state: StateSettings = StateSettings()
    plan: PlanSettings = PlanSettings()
