"""Training programs small enough to run on eight CPU devices under any plan, and plans with given axes for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import resilient_jax as rj
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.transformer import TransformerShape
from tests.support.decoder import Decoder, LoopedDecoder, loss_of
from tests.support.plan_topologies import cluster

SHAPE = TransformerShape(
    layers=2,
    width=64,
    heads=4,
    kv_heads=4,
    head_dim=16,
    feed_forward=128,
    vocabulary_tokens=64,
    sequence_tokens=32,
)
OPTIMIZER = optax.adam(1e-2)
BATCH = 8
MESHES = [
    {Axis.REPLICA: 8},
    {Axis.FSDP: 8},
    {Axis.TENSOR: 4, Axis.REPLICA: 2},
    {Axis.SEQUENCE: 4, Axis.REPLICA: 2},
    {Axis.TENSOR: 2, Axis.FSDP: 2, Axis.SEQUENCE: 2},
    {Axis.TENSOR: 2, Axis.FSDP: 2, Axis.REPLICA: 2},
]
"""Axes of plans for eight devices."""


class NnxProgram:
    """A decoder in NNX, layer by layer, trained with Adam: state {"params", "optimizer"} of plain dicts."""

    def __init__(self, shape: TransformerShape = SHAPE, remat: bool = False):
        self.sequence_tokens = shape.sequence_tokens
        self.make = functools.partial(_make_nnx, shape, remat)
        with nnx.use_eager_sharding(False):
            self.graph, self.abstract = nnx.split(
                nnx.eval_shape(lambda: self.make(rngs=nnx.Rngs(0))), nnx.Param
            )
        self.vocabulary = shape.vocabulary_tokens

    name = "nnx"

    @property
    def model(self) -> object:
        """Return the model as `analyze_program` takes it."""
        return self.make

    def profile(self, examples: int = BATCH, remat=None) -> rj.planning.ProgramCost:
        tokens = jax.ShapeDtypeStruct((examples, self.sequence_tokens), jnp.int32)
        return rj.planning.analyze_program(
            self.model,
            loss_of,
            tokens,
            name=self.name,
            optimizer=OPTIMIZER,
            sequence_tokens=self.sequence_tokens,
            remat_model=remat,
        )

    def init(self):
        with nnx.use_eager_sharding(False):
            params = nnx.to_pure_dict(nnx.split(self.make(rngs=nnx.Rngs(0)), nnx.Param)[1])
        return {"params": params, "optimizer": OPTIMIZER.init(params)}

    @functools.cached_property
    def state(self):
        """What `init` gives, in numpy: JAX would compile a program for each array that it cuts into shards."""
        return jax.tree.map(np.asarray, self.init())

    def loss(self, params, batch):
        with nnx.use_eager_sharding(False):
            return loss_of(nnx.merge(self.graph, params), batch)

    def step(self, state, tokens):
        return train_step(self.loss, state, tokens)

    def batch(self, seed=0, examples=BATCH):
        drawn = np.random.default_rng(seed)
        return drawn.integers(0, self.vocabulary, (examples, self.sequence_tokens), np.int32)


def _make_nnx(shape, remat, rngs):
    return Decoder(shape, rngs, remat=remat)


class LinenProgram(NnxProgram):
    """The same decoder as a loop over stacked layers in Linen, with logical names; the state keeps its boxes."""

    def __init__(self, shape: TransformerShape = SHAPE, remat: bool = False):
        self.sequence_tokens, self.vocabulary = shape.sequence_tokens, shape.vocabulary_tokens
        self.module = LoopedDecoder(shape, remat=remat)
        self._init_variables = jax.jit(
            self.module.init
        )  # one operation after the other takes 1.6 s each time

    name = "linen"

    @property
    def model(self) -> object:
        return self.module

    def init(self):
        params = self._init_variables(jax.random.key(0), self.batch())["params"]
        return {"params": params, "optimizer": OPTIMIZER.init(params)}

    def loss(self, params, batch):
        return loss_of(lambda given: self.module.apply({"params": params}, given), batch)


EXPERTS, WIDTH, HIDDEN = 4, 32, 64
EXPERT_NAMES = rj.LogicalAxisRules(
    names_by_path=[
        ("router", ("embed", "router")),
        ("up", ("experts", "embed", "mlp")),
        ("down", ("experts", "mlp", "embed")),
    ]
)


class ExpertProgram(NnxProgram):
    """A layer of experts as a plain function; every expert sees every row, weighted by the router."""

    sequence_tokens = None

    def __init__(self):
        pass

    def make(self, key):
        drawn = np.random.default_rng(0)
        return {
            "router": drawn.standard_normal((WIDTH, EXPERTS), np.float32),
            "up": drawn.standard_normal((EXPERTS, WIDTH, HIDDEN), np.float32) / 8,
            "down": drawn.standard_normal((EXPERTS, HIDDEN, WIDTH), np.float32) / 8,
        }

    def loss(self, params, batch):
        chosen = jax.nn.softmax(batch @ params["router"])
        hidden = jnp.tanh(jnp.einsum("bd,edh->beh", batch, params["up"]))
        out = jnp.einsum("beh,ehd,be->bd", hidden, params["down"], chosen)
        return jnp.mean((out - batch) ** 2)

    def profile(self, examples: int = BATCH, remat=None) -> rj.planning.ProgramCost:
        rows = jax.ShapeDtypeStruct((examples, WIDTH), jnp.float32)
        return rj.planning.analyze_program(
            lambda key: self.make(key),
            self.loss,
            rows,
            name="experts",
            optimizer=OPTIMIZER,
            logical_axis_rules=EXPERT_NAMES,
        )

    def init(self):
        params = self.make(None)
        return {"params": params, "optimizer": OPTIMIZER.init(params)}

    def batch(self, seed=0, examples=BATCH):
        return np.random.default_rng(seed).standard_normal((examples, WIDTH), np.float32)


def train_step(loss, state, batch):
    """Return (state, loss) after one step of Adam."""
    value, gradients = jax.value_and_grad(loss)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, value


def plan_with(
    profile: rj.planning.ProgramCost, axes, hosts: int = 4, devices: int = 2, batch: int = BATCH
) -> rj.planning.Plan:
    """Return the best plan with these axes; axes that are not given are 1."""
    given = dict.fromkeys((a for a in Axis if a is not Axis.REPLICA), 1) | dict(axes)
    return rj.planning.search_plan(
        profile, cluster([1.0] * hosts, devices=devices), global_batch=batch, axes=given, number_format="bf16"
    )
