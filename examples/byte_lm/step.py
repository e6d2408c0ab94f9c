"""The pure parts of one training step, on pytrees.

Jitted functions of this module outlive every call of `train`, so their programs do too: after a change
of membership the devices of this host are the same, and nothing is compiled again.
"""

import functools
import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from byte_lm.model import ByteLM, graph_definition
from byte_lm.settings import ModelSettings, OptimizerSettings, Settings

Tree = optax.Params
"""Arrays by the names of the network's parts: nested dicts, as `nnx.to_pure_dict` makes them."""


class State(NamedTuple):
    """What a host keeps from step to step, and what must outlive the failure of another."""

    params: Tree
    optimizer: optax.OptState
    loss: jax.Array
    """float32[]: mean loss of the last step, before its update; NaN before the first."""


class Total(NamedTuple):
    """Sums over microbatches; each enters with the mean over its bytes.

    While microbatches are added, every leaf has a leading dim of devices: each device adds up its own
    part, and the devices talk once a step, not once a microbatch.
    """

    gradients: Tree
    loss: jax.Array


@functools.partial(jax.jit, static_argnames="settings")
def init_state(settings: Settings) -> State:
    """Gives the state before step 0: a pure function of the settings, the same on every host."""
    params = nnx.to_pure_dict(nnx.state(ByteLM(settings.model, nnx.Rngs(settings.seed)), nnx.Param))
    return State(params, make_optimizer(settings.optimizer).init(params), jnp.float32(jnp.nan))


@functools.partial(jax.jit, static_argnames=("settings", "devices"))
def init_total(settings: Settings, *, devices: int) -> Total:
    """Gives the sum over no microbatch: zeros, [devices, ...] in the shape of the gradients."""
    params = jax.eval_shape(lambda: init_state(settings)).params
    gradients = jax.tree.map(lambda p: jnp.zeros((devices, *p.shape), p.dtype), params)
    return Total(gradients, jnp.zeros(devices))


def predict(params: Tree, tokens: jax.Array, *, model: ModelSettings) -> jax.Array:
    """Gives the logits float32[batch, T, 256] of the byte that follows each of `tokens`, int[batch, T]."""
    return nnx.merge(graph_definition(model), params)(tokens)


@functools.partial(jax.jit, static_argnames="model")
def accumulate(total: Total, params: Tree, batch: jax.Array, *, model: ModelSettings) -> Total:
    """Adds one microbatch: its mean cross-entropy, and the gradient of that.

    Args:
        total: the sum so far, [devices, ...], cut over the devices.
        params: the network's numbers, on every device.
        batch: uint8[sequences, T + 1], cut over the devices.
        model: the network's sizes.

    Returns:
        The sum with this microbatch in it.
    """

    def mean_loss(params: Tree, part: jax.Array) -> jax.Array:
        logits, targets = predict(params, part[:, :-1], model=model), part[:, 1:].astype(jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    parts = batch.reshape(*total.loss.shape, -1, batch.shape[-1])
    losses, gradients = jax.vmap(jax.value_and_grad(mean_loss), in_axes=(None, 0))(params, parts)
    return jax.tree.map(jnp.add, total, Total(gradients, losses))


@jax.jit
def mean_over_devices(total: Total) -> Total:
    """Gives the sum without its leading dim: the devices had parts of one size, so theirs is the mean."""
    return jax.tree.map(lambda parts: parts.mean(axis=0), total)


@functools.partial(jax.jit, static_argnames="settings")
def apply_total(state: State, total: Total, *, settings: Settings) -> State:
    """Gives the state after a step: gradient = total / B, clipped, through AdamW.

    B is the constant number of microbatches, so the step is the same however many hosts shared it.
    The old state is not donated: it is the committed one, which a failure falls back to, until the
    new one is committed.
    """
    gradients, loss = jax.tree.map(lambda summed: summed / settings.microbatches, total)
    optimizer = make_optimizer(settings.optimizer)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), optimizer_state, loss)


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Gives AdamW behind a clip; only matrices decay, not norms and biases."""
    rate = optax.linear_schedule(0.0, settings.learning_rate, settings.warmup_steps)
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            rate,
            weight_decay=settings.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )


def digest_params(params: Tree) -> str:
    """Gives the SHA-256 of the numbers, with their paths and types: equal only if they are, bit for bit."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
