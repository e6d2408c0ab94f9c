"""Exact accumulations on one host: limits from microbatch 0, sums that are made again, threads that wait."""

import collections
import threading
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.compile.training_threads import is_training_thread
from resilient_jax.events import EventKind
from resilient_jax.step.assignment import AccumulationOptions, ReplicaShape
from resilient_jax.worker.committed_state import CommittedState
from resilient_jax.worker.standalone import StandaloneControl
from tests.support.eight_devices import eight_devices as eight_devices
from tests.support.standalone_world import make_world

COUNT = 6
SHAPE = (64, 32)


def make_part(index: int) -> np.ndarray:
    return np.random.default_rng(index).standard_normal(SHAPE).astype(np.float32)


class Computation:
    """Counts what is computed; `change` is what happens to some microbatches.

    Args:
        change: by the index of the microbatch, a factor or what is raised once.
    """

    def __init__(self, change=None):
        self.counts = collections.Counter()
        self._change = dict(change or {})

    def __call__(self, microbatch):
        # Hosts compare what they compute by tracing a call, which computes nothing.
        is_traced = isinstance(jnp.zeros(()), jax.core.Tracer)
        self.counts[microbatch.index] += not is_traced
        change = self._change.get(microbatch.index, 1.0)
        if isinstance(change, Exception):
            if is_traced:
                raise change
            del self._change[microbatch.index]
            raise change
        where = jax.sharding.NamedSharding(microbatch.replica.mesh, jax.sharding.PartitionSpec())
        part = jax.device_put(make_part(microbatch.index) * np.float32(change), where)
        return {"loss": jnp.sum(part), "weights": part}


@pytest.fixture
def events(monkeypatch):
    """The kinds and details of the events that are recorded."""
    found = []
    record = StandaloneControl.record_event

    def keep(self, kind, **detail):
        found.append((kind, detail))
        return record(self, kind, **detail)

    monkeypatch.setattr(StandaloneControl, "record_event", keep)
    return found


def accumulate(compute, *, reduction: Any = "exact", per_host: Any = 1, committed=None):
    world = make_world(committed=committed)
    next(world.steps(1))
    zeros = {"loss": jnp.zeros(()), "weights": jnp.zeros(SHAPE)}
    if per_host != 1:
        zeros = jax.device_put(
            zeros, jax.sharding.NamedSharding(world.local_mesh(), jax.sharding.PartitionSpec())
        )
    options = AccumulationOptions(reduction=reduction, replica_shape=ReplicaShape(per_host=per_host))
    return jax.tree.map(np.asarray, world.accumulate_microbatches(COUNT, compute, zeros, options=options))


@pytest.mark.parametrize("per_host", [1, 2])
def test_training_waits_for_each_thread_that_computes_microbatches(per_host):
    threads = {}

    def compute(microbatch):
        threads[threading.get_ident()] = is_training_thread()
        return Computation()(microbatch)

    accumulate(compute, per_host=per_host)
    assert len(threads) >= per_host
    assert all(threads.values())


def test_a_sum_in_fixed_point_is_within_its_bound_and_made_once(events):
    compute = Computation()
    found = accumulate(compute)
    parts = np.stack([make_part(index) for index in range(COUNT)]).astype(np.float64)
    np.testing.assert_allclose(found["weights"], parts.sum(axis=0), rtol=2.0**-23, atol=COUNT * 2.0**-21)
    assert compute.counts == dict.fromkeys(range(COUNT), 1)
    assert events == []


@pytest.mark.parametrize("factor", [1e6, np.inf, np.nan])
def test_a_sum_with_a_microbatch_beyond_the_limits_is_made_again_in_bins(factor, events):
    compute = Computation({4: factor})
    found = accumulate(compute)
    wide = accumulate(Computation({4: factor}), reduction="exact_wide")
    assert found["weights"].tobytes() == wide["weights"].tobytes()
    assert found["loss"].tobytes() == wide["loss"].tobytes()
    assert compute.counts == dict.fromkeys(range(COUNT), 2)
    assert events == [(EventKind.SUM_REPEATED, {"step": 0, "name": "train", "leaves": "['weights']"})]


def test_microbatch_0_of_zeros_leads_to_another_sum_and_no_wrong_one(events):
    found = accumulate(Computation({0: 0.0}))
    wide = accumulate(Computation({0: 0.0}), reduction="exact_wide")
    assert found["weights"].tobytes() == wide["weights"].tobytes()
    assert [kind for kind, _ in events] == [EventKind.SUM_REPEATED]


def test_the_next_generation_computes_only_what_is_missing(events):
    committed, compute = CommittedState(), Computation({3: OSError("away")})
    with pytest.raises(OSError, match="away"):
        accumulate(compute, committed=committed)
    found = accumulate(compute, committed=committed)
    assert compute.counts == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 1}
    assert found["weights"].tobytes() == accumulate(Computation())["weights"].tobytes()


@pytest.mark.parametrize("failing", [0, 3])
def test_a_replica_that_fails_before_the_limits_are_known_lets_the_other_go(failing):
    committed, compute = CommittedState(), Computation({failing: OSError("away")})
    with pytest.raises(OSError, match="away"):
        accumulate(compute, per_host=2, committed=committed)
    (kept,) = committed.contributions.values()
    assert kept.limits is None
    assert [part.is_started for part in kept.parts.values()] == [False]
    found = accumulate(compute, per_host=2, committed=committed)
    assert compute.counts.total() == COUNT + 1, "only what failed is computed again"
    assert found["weights"].tobytes() == accumulate(Computation(), per_host=2)["weights"].tobytes()
    assert threading.active_count() < 20


def test_any_number_of_replicas_gives_the_same_bits():
    alone = accumulate(Computation())
    for per_host in (2, 4, "devices"):
        assert accumulate(Computation(), per_host=per_host)["weights"].tobytes() == alone["weights"].tobytes()
