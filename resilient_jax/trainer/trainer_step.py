"""The step of a trainer in a loop of the user's: data, forward, backward, sums over hosts and update, as in `fit`."""

import dataclasses
import time
from typing import Final

import jax

from resilient_jax.errors import CallerError
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.fit_loop import FitGeneration, FitLoop
from resilient_jax.trainer.fit_result import FitResult
from resilient_jax.trainer.training_state import State
from resilient_jax.worker.world import World

OF_FIT: Final = ("early_stopping", "callbacks", "log_directory")
"""Options of a trainer that `fit` alone follows."""


class TrainerStep:
    """Computes the steps of a trainer over all hosts, in one generation; see `Trainer.run`.

    A state is an opaque tree of arrays: of a pipeline each host has those of its layers. Every host makes the same
    calls, in the same order.
    """

    def __init__(self, world: World, loop: FitLoop) -> None:
        self._world, self._loop = world, loop
        self._generation: FitGeneration | None = None
        self._num_steps = 0
        """Of this generation."""
        self._metrics: dict[str, float] = {}

    def restore_or_init(self) -> State:
        """Return the state that was committed last; else that of the newest checkpoint; else the initial one.

        The first call in a generation.

        Raises:
            CallerError: model, loss, optimizer or data are not as expected.
        """
        self._generation, state = self._loop.open_generation(self._world)
        return state

    def __call__(self, state: State, step: int) -> tuple[State, dict[str, float]]:
        """Return the state after a step, and the means of loss and metrics over its microbatches.

        Nothing is committed: give the state to `world.commit`.

        The state that is given is donated, as `jax.jit(step, donate_argnums=0)` does: use the one that is returned.

        Args:
            state: state from `restore_or_init`, or from the step before.
            step: step from `world.steps`.

        Raises:
            CallerError: the state was given to a step before, or is that after another number of steps.
            NonFiniteError: a microbatch is not finite, and the policy is to stop.
        """
        generation = self._require_generation()
        _require_arrays(state)
        if self._num_steps == 1:
            self._loop.compile_ahead(generation)
        began_s = time.monotonic()
        state, self._metrics = generation.step(state, step)
        generation.end_step(self._num_steps, time.monotonic() - began_s)
        self._num_steps += 1
        return state, self._metrics

    def save(self, state: State) -> None:
        """Take a snapshot of a state that is committed, and start a checkpoint if one is due. After each commit.

        Raises:
            CallerError: the state was given to a step.
        """
        _require_arrays(state)
        generation = self._require_generation()
        self._loop.save(generation, state, generation.layout.read_step(state))

    def evaluate(self, state: State) -> dict[str, float]:
        """Return the metrics of the trainer's evaluation.

        Raises:
            CallerError: the trainer has no evaluation, or the state was given to a step.
        """
        _require_arrays(state)
        return self._loop.evaluate(self._require_generation(), state)

    def finish(self, state: State) -> FitResult:
        """Return the result of the last state, as `fit` does, when it is on storage if there are checkpoints.

        Raises:
            CallerError: the state was given to a step.
        """
        _require_arrays(state)
        found = self._loop.finish(self._require_generation(), state)
        return dataclasses.replace(found, metrics=dict(self._metrics))

    def _require_generation(self) -> FitGeneration:
        if self._generation is None:
            raise CallerError(
                "train: found a call before train_step.restore_or_init(), expected that first: it says where the state "
                "is in this generation"
            )
        return self._generation


def _require_arrays(state: State) -> None:
    """Refuse a state whose arrays a step has donated."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise CallerError(
                f"train_step: found a state whose {jax.tree_util.keystr(path)} was deleted, expected the state that "
                "the last step returned. A step donates the state that it is given: copy to host memory before what "
                "you need of it later"
            )


def check_own_loop(config: FitConfig) -> None:
    """Refuse options of a trainer that a loop of the user's does not follow.

    Raises:
        CallerError: the trainer has such an option; the message names the first.
    """
    for name in OF_FIT:
        if getattr(config, name):
            raise CallerError(
                f"{name}: found it in a trainer with a loop of your own, expected it with fit alone. Leave it out: "
                "your loop has the metrics, and ends when it likes"
            )
