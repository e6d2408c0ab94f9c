"""The trainer's checks of its hosts: batch sizes and checkpoints."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_jax.errors import CallerError, StateError
from resilient_jax.step.assignment import ReplicaShape
from resilient_jax.trainer.checkpoints import Checkpoints
from resilient_jax.trainer.host_checks import agree_on_checkpoint, check_batch_size, check_microbatch_size
from tests.support.summing_hosts import add_messages


@dataclasses.dataclass
class FakeWorld:
    """A world of three hosts with four devices each; the other hosts have found `found`."""

    found: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ("a", "b", "c")
    host: str = "a"
    host_index: int = 0
    local_devices: tuple[int, ...] = (0, 1, 2, 3)
    devices: tuple[Any, ...] = tuple(SimpleNamespace(process_index=host) for host in 4 * [0, 1, 2])

    def count_replicas(self, replica_shape):
        return len(self.hosts) // replica_shape.hosts * replica_shape.per_host

    def all_reduce(self, mine):
        return add_messages(mine, list(enumerate(self.found, start=1)))


def make_config(*, size=8, num_microbatches=4, evaluation_size=None, **shape) -> Any:
    return SimpleNamespace(
        microbatch_size=size,
        recipe=SimpleNamespace(num_microbatches=num_microbatches),
        parallelism=SimpleNamespace(replica_shape=ReplicaShape(**shape)),
        evaluation=SimpleNamespace(microbatch_size=evaluation_size),
    )


WORLD: Any = FakeWorld()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (make_config(size=6), "microbatch_size: found 6 on host a, expected a multiple of 4"),
        (make_config(size=12, hosts=2), "expected a multiple of 8"),
        (make_config(size=3, per_host=2), "expected a multiple of 2"),
        (make_config(evaluation_size=6), "the evaluation's microbatch_size: found 6"),
    ],
    ids=["one host", "two hosts", "half a host", "evaluation"],
)
def test_a_microbatch_that_a_replica_cannot_shard_is_refused(config, said):
    with pytest.raises(CallerError, match=said):
        check_microbatch_size(WORLD, config, config.parallelism.replica_shape)


@pytest.mark.parametrize(
    "config", [make_config(), make_config(size=16, hosts=2), make_config(size=2, per_host=2)], ids=str
)
def test_a_microbatch_that_a_replica_can_shard_is_accepted(config):
    check_microbatch_size(WORLD, config, config.parallelism.replica_shape)


def test_more_replicas_than_microbatches_are_refused_with_the_numbers_and_a_remedy():
    with pytest.raises(
        CallerError, match=r"found 16, which is 2 microbatches of 8.*3 replicas.*batch_size of 24"
    ):
        check_batch_size(WORLD, make_config(num_microbatches=2), ReplicaShape())
    check_batch_size(WORLD, make_config(num_microbatches=3), ReplicaShape())


def test_the_error_names_hosts_that_found_different_checkpoints():
    checkpoints = Checkpoints(directory="/somewhere")
    world: Any = FakeWorld(found=(7, -1))
    with pytest.raises(StateError, match=r"/somewhere \(a: step 7, b: step 7, c: none\)"):
        agree_on_checkpoint(world, 7, checkpoints)


def test_hosts_that_found_the_same_checkpoint_resume_from_it():
    checkpoints = Checkpoints(directory="/somewhere")
    together: Any = FakeWorld(found=(7, 7))
    fresh: Any = FakeWorld(found=(-1, -1))
    assert agree_on_checkpoint(together, 7, checkpoints) == 7
    assert agree_on_checkpoint(fresh, None, checkpoints) is None
