"""A small mixture of experts in NNX: tokens are sent to the expert that their router chooses, by products with one-hot
matrices (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; the capacity of Fedus et al. 2021,
https://arxiv.org/abs/2101.03961)."""

import jax
import jax.numpy as jnp
from flax import nnx

CAPACITY_FACTOR = 1.5


class Experts(nnx.Module):
    """A layer of experts, each a network with one hidden layer, and the router; dims have their logical names.

    A token goes to the one expert with the highest probability. An expert takes the first C = 1.5 tokens / experts of
    its tokens; what is beyond passes by.
    """

    def __init__(self, width: int, hidden: int, experts: int, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(0.2)

        def make(shape: tuple[int, ...], names: tuple[str, ...]) -> nnx.Param:
            return nnx.Param(nnx.with_partitioning(normal, names)(rngs.params(), shape, jnp.float32))

        self.router = make((width, experts), ("embed", "router"))
        self.up = make((experts, width, hidden), ("experts", "embed", "mlp"))
        self.down = make((experts, hidden, width), ("experts", "mlp", "embed"))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return float32[tokens, width] for the same, and float32[], the loss that balances the load of experts."""
        num_tokens, num_experts = x.shape[0], self.router.shape[1]
        capacity = int(CAPACITY_FACTOR * num_tokens / num_experts)
        probabilities = jax.nn.softmax(x @ self.router[...])
        chosen = jax.nn.one_hot(jnp.argmax(probabilities, axis=-1), num_experts)  # [tokens, experts]
        place = (jnp.cumsum(chosen, axis=0) - 1) * chosen  # among the tokens of an expert, from 0
        places = jax.nn.one_hot(
            jnp.sum(place, axis=-1).astype(jnp.int32), capacity
        )  # all 0 beyond the capacity
        sent = jnp.einsum("te,tc->tec", chosen, places)
        hidden = jnp.tanh(jnp.einsum("tec,td,edm->ecm", sent, x, self.up[...]))
        combine = sent * jnp.sum(probabilities * chosen, axis=-1)[:, None, None]
        out = jnp.einsum("tec,ecm,emd->td", combine, hidden, self.down[...])
        balance = num_experts * jnp.sum(jnp.mean(chosen, axis=0) * jnp.mean(probabilities, axis=0))
        return x + out, balance


def compute_experts_loss(model: Experts, rows: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of rows that are to be turned by one place, and the balance of the experts as a metric."""
    out, balance = model(rows)
    return jnp.mean((out - jnp.roll(rows, 1, axis=1)) ** 2) + 0.01 * balance, {"balance": balance}
