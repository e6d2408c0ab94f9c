"""The training objective: the loss of a microbatch, and the optimizer."""

import jax
import jax.numpy as jnp
import optax

from byte_lm.model import ByteLM
from byte_lm.settings import OptimizerSettings


def loss(model: ByteLM, batch: jax.Array) -> jax.Array:
    """Return the mean cross-entropy, in nats, of each next byte.

    Args:
        model: the network.
        batch: uint8[sequences, T + 1].
    """
    logits, targets = model(batch[:, :-1]), batch[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Return AdamW with weight decay of matrices only, not of norms and biases."""
    rate = optax.linear_schedule(0.0, settings.learning_rate, settings.warmup_steps)
    return optax.adamw(
        rate,
        weight_decay=settings.weight_decay,
        mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    )
