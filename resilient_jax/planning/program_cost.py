"""What the searcher must know of a program: its tensors, what one sequence costs, and what can be cut.

Everything is for one example of a batch, here always called a sequence, and for a program on one device: a plan divides
it. Nothing in it depends on devices or on how many examples are in a microbatch.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from resilient_jax.planning.axes import Axis


class ModelPart(enum.StrEnum):
    """Where in a program something belongs. A pipeline cuts between layers only."""

    EMBEDDING = "embedding"
    """Before the layers: on the first stage."""
    LAYER = "layer"
    """Each of the equal layers."""
    HEAD = "head"
    """After the layers, with the loss: on the last stage."""


class TensorRole(enum.StrEnum):
    """What a tensor of the training state is for."""

    PARAMETER = "parameter"
    """Has a gradient of the same shape."""
    OPTIMIZER = "optimizer"
    """Changed with the parameters, once in a step."""
    OTHER = "other"
    """Statistics and constants: no gradient."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of the training state.

    Attributes:
        path: in the state's tree, by `/`; `*` stands for the number of the layer.
        role: what it is for.
        parts: where it is used; a tied embedding is in two.
        shape: of one copy.
        names: logical name of each dim; None: it has none.
        axes: which axis may cut each dim; `FSDP`: it would rather cut this dim than another.
        units: of each dim, how many pieces it may be cut into at most: heads and not numbers, where a dim holds the
            numbers of several heads. Divides the dim.
        dtype_bytes: of one number.
        copies: how many equal ones: one in each layer.
        stacked: the dim of the state's array over which the copies are stacked, which `shape` has not; None: each copy
            is an array of its own.
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
        """Numbers in all copies."""
        return math.prod(self.shape) * self.copies

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        return self.size * self.dtype_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AmountByAxis:
    """An amount of one sequence, by what cuts it. Axes that cut the batch, and `SEQUENCE`, cut all of it.

    Attributes:
        whole: by nothing more.
        tensor: by `TENSOR` (heads, feed-forward).
        attention: by `TENSOR`; what belongs to pairs of tokens, and grows with the square of the sequence.
        vocabulary: by `TENSOR`, where it divides the vocabulary.
        expert: by `EXPERT`, and by `TENSOR`.
    """

    replicated: float = 0.0
    tensor: float = 0.0
    attention: float = 0.0
    vocabulary: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """On one device."""
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
        """Times a factor."""
        return type(self)(
            replicated=self.replicated * factor,
            tensor=self.tensor * factor,
            attention=self.attention * factor,
            vocabulary=self.vocabulary * factor,
            expert=self.expert * factor,
        )


class CollectiveKind(enum.StrEnum):
    """A collective operation."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCollective:
    """Activations of one sequence that devices along an axis must exchange, if the plan has that axis.

    Exchanges of parameters and gradients (`REPLICA`, `FSDP`) follow from the tensors and are not listed.

    Attributes:
        axis: whose devices.
        kind: the operation.
        message_bytes: the complete array's, before anything cuts it.
        forward: how many of them forward; once more in all, where the part is computed again.
        backward: how many backward.
        dim: needed only if the axis cuts dims of this name; None: always.
    """

    axis: Axis
    kind: CollectiveKind
    message_bytes: float
    forward_count: int
    backward_count: int
    logical_name: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """What one part does for one sequence, in one of its copies.

    FLOPs are a multiplication and an addition for each pair, so 2 n m k for a product of (n, k) and (k, m).

    Attributes:
        part: which.
        copies: how many of it, one after another: the layers.
        forward_flops, backward_flops: of matrix products; without what is computed again.
        recomputed_flops: more of them, where the part is rematerialised.
        forward_other_flops, backward_other_flops: of everything else, one for each number of a result; an accelerator
            does them elsewhere than matrix products, and waits for memory.
        forward_bytes, backward_bytes: activations read and written. Parameters come on top: read once forward and once
            backward, and their gradients written.
        input_bytes: what goes into the part, and so between stages.
        kept_bytes: what is kept from forward to backward.
        rematerialised_bytes: what is kept instead, if the part is computed again: as a rule its input. Then one copy at
            a time needs `kept_bytes` as well.
        working_bytes: what the part's backward needs for a time, beyond what is kept.
        remat_working_bytes: the same where it is computed again; None: `working_bytes` and `kept_bytes`.
        exchanges: between devices.
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
    step_flops: AmountByAxis = dataclasses.field(init=False, repr=False, compare=False)
    step_bytes: AmountByAxis = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_flops", self.forward_flops + self.backward_flops)
        object.__setattr__(self, "step_bytes", self.forward_bytes + self.backward_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DivisibilityRule:
    """A number that an axis has to divide.

    Attributes:
        axis: which.
        name: the dim's logical name.
        number: of what is not cut any further.
        required: True: an axis that does not divide it cannot be used. False: the dim stays whole then.
    """

    axis: Axis
    logical_name: str
    dim_size: int
    is_required: bool


class FsdpGathers(NamedTuple):
    """How FSDP gathers the parameters of a part.

    Attributes:
        passes: in which they are: 2: forward and backward; 1: once, and kept.
        pieces: collectives of a pass.
    """

    passes: int
    pieces: int


BLOCKING_BACKENDS = frozenset({"cpu"})
"""Whose collectives are done when they are called. What XLA makes of FSDP there: seen in what jax 0.10.2 compiles."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """All that a plan is judged by; the same whether it was computed from sizes or taken from a program.

    Attributes:
        name: of the model.
        source: where the figures come from, in words.
        sequence_tokens: in a sequence; None: the program's examples are no sequences.
        compute_bytes: of one number in matrix products; parameters are gathered in this type.
        gradient_bytes: of one number in a gradient.
        tensors: the training state.
        work: in the order of the forward pass; at most one of each part.
        divisors: what axes have to divide. `FSDP` and `REPLICA` divide the microbatch, which is a plan's own choice.
        fixed_bytes: memory that the gradient's program needs beside parameters and activations, whatever the batch:
            gradients made before activations are freed, parameters in another type. Cut as parameters are. Its peak is
            parameters + max(gradients, fixed_bytes + activations); if it adds to a sum of gradients, that comes on top.
        backend: of JAX, on which memory and bytes moved were measured; None: closed form, and `fixed_bytes` is 0.
        can_rematerialise: whether the program can compute layers again instead of keeping their activations.
        divisibility_rules_by_dim: those of an axis and a name, for whoever asks often.
        fsdp_gathers: how FSDP gathers each part, for whoever asks often. A compiler whose collectives wait gathers each
            array by itself, and twice only if forward and backward are loops of their own; others gather all of a
            layer at once.
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
        """Equal layers: as many stages as a pipeline can have; their number per stage may differ."""
        return max((work.copies for work in self.parts if work.part is ModelPart.LAYER), default=0)

    @property
    def parameter_count(self) -> int:
        """Numbers in all parameters."""
        return sum(tensor.size for tensor in self._of(TensorRole.PARAMETER))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(tensor.bytes for tensor in self._of(TensorRole.PARAMETER))

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(tensor.bytes for tensor in self._of(TensorRole.OPTIMIZER))

    @property
    def forward_flops(self) -> AmountByAxis:
        """Of matrix products, one sequence, all parts."""
        return sum_amounts(work.forward_flops.scaled(work.copies) for work in self.parts)

    @property
    def backward_flops(self) -> AmountByAxis:
        """Of matrix products, one sequence, all parts."""
        return sum_amounts(work.backward_flops.scaled(work.copies) for work in self.parts)

    @property
    def other_flops(self) -> float:
        """Of everything but matrix products, forward and backward, one sequence."""
        return sum(
            (work.forward_other_flops + work.backward_other_flops) * work.copies for work in self.parts
        )

    @property
    def has_blocking_collectives(self) -> bool:
        """The compiler that was measured waits for a collective when it is called."""
        return self.backend in BLOCKING_BACKENDS

    @property
    def has_scanned_layers(self) -> bool:
        """The layers are turns of a loop."""
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
    """Their sum, each kind by itself."""
    return sum(amounts, start=AmountByAxis())
