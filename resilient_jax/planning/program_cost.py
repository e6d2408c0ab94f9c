"""What the planner needs of a program: its tensors, the cost of one sequence, and what can be sharded.

Everything is for one example of a batch, here always called a sequence, and for a program on one device: a plan divides
it. Nothing in it depends on devices or on the number of examples in a microbatch.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from resilient_jax.planning.axes import Axis


class ModelPart(enum.StrEnum):
    """A part of a model. A pipeline is divided between layers only."""

    EMBEDDING = "embedding"
    """Before the layers: on the first stage."""
    LAYER = "layer"
    """Each of the equal layers."""
    HEAD = "head"
    """After the layers, with the loss: on the last stage."""


class TensorRole(enum.StrEnum):
    """The role of a tensor in the training state."""

    PARAMETER = "parameter"
    """Has a gradient of the same shape."""
    OPTIMIZER = "optimizer"
    """Updated with the parameters, once in a step."""
    OTHER = "other"
    """Batch statistics and constants, without a gradient."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of the training state.

    Attributes:
        path: path in the state's tree, separated by `/`; `*` stands for the index of the layer.
        parts: parts that use it; a tied embedding is in two.
        shape: shape of one copy.
        logical_names: logical name of each dim, or None.
        axes: the axis that may shard each dim; `FSDP`: FSDP prefers this dim to another.
        units: the most shards of each dim, a divisor of its size. Where a dim holds several heads these
            are the heads, not the elements.
        copies: number of equal tensors: one in each layer.
        stacked_dim: the dim of the state's array over which the copies are stacked, which `shape` lacks; None: each
            copy is an array of its own.
    """

    path: str
    role: TensorRole
    parts: tuple[ModelPart, ...]
    shape: tuple[int, ...]
    logical_names: tuple[str | None, ...]
    axes: tuple[Axis | None, ...]
    units: tuple[int, ...]
    dtype_bytes: int
    copies: int = 1
    stacked_dim: int | None = None

    @property
    def size(self) -> int:
        """The number of elements in all copies together."""
        return math.prod(self.shape) * self.copies

    @property
    def bytes(self) -> int:
        """The bytes of all copies together, before any axis shards them."""
        return self.size * self.dtype_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AmountByAxis:
    """An amount of one sequence, by the axes that divide it.

    Axes that shard the batch, and `SEQUENCE`, divide all of it.

    Attributes:
        replicated: divided by no further axis.
        tensor: divided by `TENSOR` (heads, feed-forward).
        attention: divided by `TENSOR`; belongs to pairs of tokens, and grows with the square of the sequence.
        vocabulary: divided by `TENSOR`, where that divides the vocabulary.
        expert: divided by `EXPERT` and by `TENSOR`.
    """

    replicated: float = 0.0
    tensor: float = 0.0
    attention: float = 0.0
    vocabulary: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """The undivided amount, on one device."""
        return self.replicated + self.tensor + self.attention + self.vocabulary + self.expert

    def __add__(self, other: Self) -> Self:
        return type(self)(
            replicated=self.replicated + other.replicated,
            tensor=self.tensor + other.tensor,
            attention=self.attention + other.attention,
            vocabulary=self.vocabulary + other.vocabulary,
            expert=self.expert + other.expert,
        )

    def scaled(self, factor: float) -> Self:
        """Return the amount times a factor."""
        return type(self)(
            replicated=self.replicated * factor,
            tensor=self.tensor * factor,
            attention=self.attention * factor,
            vocabulary=self.vocabulary * factor,
            expert=self.expert * factor,
        )


class CollectiveKind(enum.StrEnum):
    """A kind of collective operation, as XLA names it; the kinds move different amounts of data."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCollective:
    """A collective over activations of one sequence that a plan needs if it has the axis.

    Collectives over parameters and gradients (`REPLICA`, `FSDP`) follow from the tensors and are not listed.

    Attributes:
        message_bytes: bytes of the complete array, before any axis shards it.
        forward_count: collectives in the forward pass; they repeat where the part is recomputed.
        logical_name: the collective is needed only if the axis shards dims of this name; None: always.
    """

    axis: Axis
    kind: CollectiveKind
    message_bytes: float
    forward_count: int
    backward_count: int
    logical_name: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """The cost of one copy of a part for one sequence.

    A multiplication and an addition are two FLOPs, so a product of (n, k) and (k, m) has 2 n m k.

    Attributes:
        copies: number of copies, one after another: the layers.
        forward_flops, backward_flops: FLOPs of matrix products, without recomputation.
        remat_flops: further FLOPs where the part is recomputed.
        forward_other_flops, backward_other_flops: operations of everything else, one per element of a result; an
            accelerator does them on other units than matrix products, and they wait for memory.
        forward_bytes, backward_bytes: activations read and written. Parameters come on top: read once forward and once
            backward, and their gradients written.
        input_bytes: bytes of the part's input, which stages of a pipeline transfer.
        residual_bytes: bytes that are kept from forward to backward.
        block_residual_bytes: what is kept instead on a stage of a pipeline, where forward and backward are programs of
            their own; None: `residual_bytes`.
        remat_residual_bytes: what is kept instead if the part is recomputed: as a rule its input. Then one copy at a
            time needs `residual_bytes` as well.
        working_bytes: what the part's backward needs for a time, beyond what is kept.
        remat_working_bytes: what the backward needs for a time where the part is recomputed; None: `working_bytes` and
            `residual_bytes`.
        kernels: kernels of a forward pass; a backward pass has twice as many.
        step_flops, step_bytes: forward and backward together.
    """

    part: ModelPart
    copies: int
    forward_flops: AmountByAxis
    backward_flops: AmountByAxis
    remat_flops: AmountByAxis
    forward_other_flops: float
    backward_other_flops: float
    forward_bytes: AmountByAxis
    backward_bytes: AmountByAxis
    input_bytes: float
    residual_bytes: AmountByAxis
    remat_residual_bytes: AmountByAxis
    working_bytes: AmountByAxis
    collectives: tuple[ActivationCollective, ...] = ()
    remat_working_bytes: AmountByAxis | None = None
    block_residual_bytes: AmountByAxis | None = None
    kernels: int = 1
    step_flops: AmountByAxis = dataclasses.field(init=False, repr=False, compare=False)
    step_bytes: AmountByAxis = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_flops", self.forward_flops + self.backward_flops)
        object.__setattr__(self, "step_bytes", self.forward_bytes + self.backward_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DivisibilityRule:
    """A size that an axis has to divide.

    Attributes:
        dim_size: the number of units that are not divided any further.
        is_required: True: an axis that does not divide it cannot be used. False: the dim is replicated then.
    """

    axis: Axis
    logical_name: str
    dim_size: int
    is_required: bool


class FsdpGathers(NamedTuple):
    """How FSDP gathers the parameters of a part.

    Attributes:
        passes: passes that gather: 2: forward and backward; 1: once, and kept.
    """

    passes: int
    pieces: int


BLOCKING_BACKENDS = frozenset({"cpu"})
"""Backends with blocking collectives: what XLA makes of FSDP there was seen with jax 0.10.2."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """What plans of a program are compared by, whether computed from sizes or measured from a program.

    Attributes:
        name: name of the model.
        source: source of the figures, in words.
        sequence_tokens: tokens in a sequence; None: the program's examples are no sequences.
        compute_bytes: bytes of an element in matrix products; parameters are gathered in this dtype.
        gradient_bytes: bytes of an element of a gradient.
        tensors: the training state.
        parts: costs in the order of the forward pass; at most one for each part.
        divisibility_rules: sizes that axes have to divide. `FSDP` and `REPLICA` divide the microbatch, which a plan
            chooses.
        fixed_bytes: memory that the gradient's program needs besides parameters and activations, whatever the batch:
            gradients made before activations are freed, parameters in another dtype. Sharded as parameters are. Its
            peak is parameters + max(gradients, fixed_bytes + activations); a sum of gradients comes on top.
        backend: JAX backend on which memory and bytes moved were measured; None: closed form, and `fixed_bytes` is 0.
        can_remat: whether the program can recompute layers instead of keeping their activations.
        divisibility_rules_by_dim: the rules of an axis and a logical name.
        fsdp_gathers: how FSDP gathers each part. A compiler with blocking collectives gathers each array by itself, and
            twice only if forward and backward are loops of their own; others gather all of a layer at once.
    """

    name: str
    source: str
    sequence_tokens: int | None
    compute_bytes: int
    gradient_bytes: int
    tensors: tuple[StateTensor, ...]
    parts: tuple[PartCost, ...]
    divisibility_rules: tuple[DivisibilityRule, ...]
    fixed_bytes: float = 0.0
    backend: str | None = None
    can_remat: bool = True
    divisibility_rules_by_dim: Mapping[tuple[Axis, str], tuple[DivisibilityRule, ...]] = dataclasses.field(
        init=False, repr=False, compare=False
    )
    fsdp_gathers: Mapping[ModelPart, FsdpGathers] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: dict[tuple[Axis, str], tuple[DivisibilityRule, ...]] = {}
        for divisor in self.divisibility_rules:
            key = (divisor.axis, divisor.logical_name)
            found[key] = (*found.get(key, ()), divisor)
        object.__setattr__(self, "divisibility_rules_by_dim", found)
        object.__setattr__(self, "fsdp_gathers", {part: self._find_gathers(part) for part in ModelPart})

    @property
    def layers(self) -> int:
        """Number of equal layers, which is the most stages of a pipeline; layers per stage may differ."""
        return max((work.copies for work in self.parts if work.part is ModelPart.LAYER), default=0)

    @property
    def parameter_count(self) -> int:
        """The number of elements in all parameters, those of every layer."""
        return sum(tensor.size for tensor in self._of(TensorRole.PARAMETER))

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters in their own dtypes, before any axis shards them."""
        return sum(tensor.bytes for tensor in self._of(TensorRole.PARAMETER))

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer state."""
        return sum(tensor.bytes for tensor in self._of(TensorRole.OPTIMIZER))

    @property
    def forward_flops(self) -> AmountByAxis:
        """FLOPs of matrix products forward, one sequence, all parts."""
        return sum_amounts(work.forward_flops.scaled(work.copies) for work in self.parts)

    @property
    def backward_flops(self) -> AmountByAxis:
        """FLOPs of matrix products backward, one sequence, all parts."""
        return sum_amounts(work.backward_flops.scaled(work.copies) for work in self.parts)

    @property
    def other_flops(self) -> float:
        """Operations other than matrix products, forward and backward, one sequence."""
        return sum(
            (work.forward_other_flops + work.backward_other_flops) * work.copies for work in self.parts
        )

    @property
    def has_blocking_collectives(self) -> bool:
        """Whether a collective of the measured backend is done when it is called."""
        return self.backend in BLOCKING_BACKENDS

    @property
    def has_scanned_layers(self) -> bool:
        """Whether the layers are iterations of a loop."""
        return any(tensor.stacked_dim is not None for tensor in self.tensors)

    def _find_gathers(self, part: ModelPart) -> FsdpGathers:
        if not self.has_blocking_collectives:
            return FsdpGathers(passes=2, pieces=1)
        arrays = sum(part in tensor.parts for tensor in self._of(TensorRole.PARAMETER))
        return FsdpGathers(
            passes=2 if self.has_scanned_layers and part is ModelPart.LAYER else 1, pieces=max(arrays, 1)
        )

    def _of(self, role: TensorRole) -> Iterable[StateTensor]:
        return (tensor for tensor in self.tensors if tensor.role is role)


def sum_amounts(amounts: Iterable[AmountByAxis]) -> AmountByAxis:
    """Return the sum, each kind by itself."""
    return sum(amounts, start=AmountByAxis())
