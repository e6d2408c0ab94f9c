"""The sizes of a decoder-only transformer, and its exact number of parameters.

Each layer is attention and a feed-forward network, both after a norm and added to their input (Xiong et al. 2020,
https://arxiv.org/abs/2002.04745). Key and value heads may be fewer than query heads (Ainslie et al. 2023,
https://arxiv.org/abs/2305.13245); the feed-forward network may be gated (Shazeer 2020,
https://arxiv.org/abs/2002.05202) or consist of several experts (Shazeer et al. 2017,
https://arxiv.org/abs/1701.06538).
"""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from resilient_jax.planning.program_cost import ModelPart

Size = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Layers = Annotated[int, Meta(ge=1, le=100_000)]


class TransformerShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes of a decoder-only transformer. Checked by `load_model_shape`, not by calling the class.

    Example:
        >>> gpt2 = TransformerShape(layers=12, width=768, heads=12, kv_heads=12, head_dim=64, feed_forward=3072,
        ...                         vocabulary_tokens=50257, sequence_tokens=1024, gated=False, norm="layer",
        ...                         biases="all", positions="table", tied_embedding=True)
        >>> count_parameters(gpt2)
        124439808
    """

    layers: Layers
    """Equal layers, each of attention and a feed-forward network."""
    width: Size
    """Elements of a token's activation between layers."""
    heads: Size
    """Query heads."""
    kv_heads: Size
    """Key heads, and value heads; if fewer than `heads`, each serves several query heads."""
    head_dim: Size
    """Elements of one head's query, key or value."""
    feed_forward: Size
    """Width inside the feed-forward network, of one expert if there are several."""
    vocabulary_tokens: Size
    """Different tokens; rows of the token embedding."""
    sequence_tokens: Size
    """Tokens in a training sequence; also the rows of a table of positions."""
    gated: bool = True
    """Whether the feed-forward network multiplies two projections up (SwiGLU), with three matrices instead of two."""
    norm: Literal["rms", "layer"] = "rms"
    """`rms` has a scale, `layer` a scale and a bias."""
    biases: Literal["none", "qkv", "all"] = "none"
    """Biases of matrices inside layers; none, those to queries, keys and values, or all."""
    positions: Literal["rotary", "table"] = "rotary"
    """With `table` an embedding of each position is added to the token's."""
    tied_embedding: bool = False
    """Whether the head uses the token embedding's matrix."""
    experts: Size = 1
    """Feed-forward networks in each layer; with more than one a router chooses."""
    experts_per_token: Size = 1
    """Experts that process each token."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} is more than experts = {self.experts}"
            )


class TransformerParameter(NamedTuple):
    """A parameter of a transformer, or one parameter in each layer."""

    path: str
    parts: tuple[ModelPart, ...]
    logical_names: tuple[str, ...]


_NORMS = {"rms": ("scale",), "layer": ("scale", "bias")}


def list_parameters(shape: TransformerShape) -> Iterator[TransformerParameter]:
    """Yield every parameter; those of `ModelPart.LAYER` are in each layer."""
    ends = (ModelPart.EMBEDDING, ModelPart.HEAD) if shape.tied_embedding else (ModelPart.EMBEDDING,)
    yield TransformerParameter("embedding/tokens", ends, ("vocab", "embed"))
    if shape.positions == "table":
        yield TransformerParameter("embedding/positions", (ModelPart.EMBEDDING,), ("positions", "embed"))
    yield from _list_layer(shape)
    yield from (
        TransformerParameter(f"head/norm/{kind}", (ModelPart.HEAD,), ("embed",))
        for kind in _NORMS[shape.norm]
    )
    if not shape.tied_embedding:
        yield TransformerParameter("head/kernel", (ModelPart.HEAD,), ("embed", "vocab"))


def _list_layer(shape: TransformerShape) -> Iterator[TransformerParameter]:
    part = (ModelPart.LAYER,)
    for norm in ("attention_norm", "feed_forward_norm"):
        yield from (
            TransformerParameter(f"layers/*/{norm}/{kind}", part, ("embed",)) for kind in _NORMS[shape.norm]
        )
    for name, heads in (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads")):
        yield TransformerParameter(f"layers/*/attention/{name}/kernel", part, ("embed", heads, "head_dim"))
        if shape.biases != "none":
            yield TransformerParameter(f"layers/*/attention/{name}/bias", part, (heads, "head_dim"))
    yield TransformerParameter("layers/*/attention/output/kernel", part, ("heads", "head_dim", "embed"))
    if shape.biases == "all":
        yield TransformerParameter("layers/*/attention/output/bias", part, ("embed",))
    yield from _list_feed_forward(shape)


def _list_feed_forward(shape: TransformerShape) -> Iterator[TransformerParameter]:
    part, experts = (ModelPart.LAYER,), () if shape.experts == 1 else ("experts",)
    if experts:
        yield TransformerParameter("layers/*/feed_forward/router/kernel", part, ("embed", "router"))
    for name in ("gate", "up") if shape.gated else ("up",):
        yield TransformerParameter(f"layers/*/feed_forward/{name}/kernel", part, (*experts, "embed", "mlp"))
        if shape.biases == "all":
            yield TransformerParameter(f"layers/*/feed_forward/{name}/bias", part, (*experts, "mlp"))
    yield TransformerParameter("layers/*/feed_forward/down/kernel", part, (*experts, "mlp", "embed"))
    if shape.biases == "all":
        yield TransformerParameter("layers/*/feed_forward/down/bias", part, (*experts, "embed"))


def get_dim_size(shape: TransformerShape, name: str) -> int:
    """Return the size of a dim by its logical name."""
    match name:
        case "vocab":
            return shape.vocabulary_tokens
        case "embed":
            return shape.width
        case "positions":
            return shape.sequence_tokens
        case "mlp":
            return shape.feed_forward
        case "router":
            return shape.experts
        # Other logical names equal the name of the field.
        case _:
            return getattr(shape, name)


def count_parameters(shape: TransformerShape) -> int:
    """Return the number of elements of all parameters."""
    return sum(
        # sum over parameters of (product of dims) (L copies for a parameter of layers).
        math.prod(get_dim_size(shape, name) for name in parameter.logical_names)
        * (shape.layers if parameter.parts == (ModelPart.LAYER,) else 1)
        for parameter in list_parameters(shape)
    )
