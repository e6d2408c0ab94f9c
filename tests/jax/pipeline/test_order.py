"""What a host of a pipeline reports of the order in which hosts make replicas."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

import resilient_jax as rj
from resilient_jax.protocol.state_records import StatePart
from resilient_jax.trainer.pipelined_steps import PipelinedSteps
from resilient_jax.worker.world import World


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = x + nn.Dense(1, name=f"layer_{number}")(x)
        return x


def test_the_order_is_reported_with_the_first_commit_though_no_loss_is_estimated():
    parts: list[StatePart | None] = []

    def train(world: World, train_step: Any) -> None:
        state = train_step.restore_or_init()
        for step in world.steps(1):
            state, metrics = train_step(state, step)
            world.commit(state, **metrics)
            (steps,) = (one for one in world._session.committed.kept if isinstance(one, PipelinedSteps))
            parts.append(steps.part)

    rj.Trainer(
        model=Net(),
        optimizer=optax.sgd(0.1),
        loss_fn=lambda model, batch: jnp.mean((model(batch) - 1) ** 2),
        data=np.linspace(-1, 1, 16, dtype=np.float32)[:, None],
        batch_size=8,
        microbatch_size=2,
        parallelism=rj.Parallelism(pipeline=rj.Pipeline(num_stages=2)),
    ).run(train)
    (part,) = parts
    assert part is not None
    assert part.losses == ()
    assert len(part.order) == 1, "this host"
