"""Replicas of one host, each on a thread of its own."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import CallerError
from resilient_jax.step.assignment import ReplicaShape, locate_replicas
from resilient_jax.step.replicas import Replica, make_replica_mesh
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module

REPLICAS, TIMES = 4, 300


class Garbage:
    """A reference cycle whose finalizer runs Python code in the middle of whatever the collector interrupts."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        sum(range(300))


@pytest.fixture
def restless():
    """Switch threads and collect garbage as often as possible."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(5)
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


def test_several_threads_move_the_same_new_array_to_their_replicas(restless):
    devices = jax.devices()
    everywhere = NamedSharding(Mesh(np.array(devices), ("data",)), P())
    parts = [shard.data for shard in jax.device_put(np.arange(3.0), everywhere).addressable_shards]
    width = len(devices) // REPLICAS
    mine = [devices[width * i : width * (i + 1)] for i in range(REPLICAS)]
    replicas = [Replica(of_one, of_one, {"data": len(of_one)}) for of_one in mine]
    together = Barrier(REPLICAS)

    def move(replica, array):
        together.wait()
        Garbage()
        return replica.to_replica(array).sharding.device_set

    with ThreadPoolExecutor(REPLICAS) as threads:
        for _ in range(TIMES):
            array = jax.make_array_from_single_device_arrays((3,), everywhere, parts)
            found = list(threads.map(move, replicas, [array] * REPLICAS))
            assert found == [set(of_one) for of_one in mine]


def test_the_mesh_of_all_replicas_has_the_devices_of_each_in_a_row():
    devices = jax.devices()
    by_host = [devices[:2], devices[2:4], devices[4:6], devices[6:]]
    shape = ReplicaShape(hosts=2, axes=(("fsdp", 2), ("tensor", 2)))
    mesh = make_replica_mesh(locate_replicas(range(4), shape, [2] * 4), by_host, shape)
    assert dict(mesh.shape) == {"replica": 2, "fsdp": 2, "tensor": 2}
    assert list(mesh.devices.flat) == devices


def test_a_mesh_of_several_replicas_of_a_host_is_refused():
    shape = ReplicaShape(per_host=2)
    locations = locate_replicas(range(1), shape, [8])
    with pytest.raises(CallerError, match=r"found ReplicaShape\(.*per_host=2.*expected replicas of one host"):
        make_replica_mesh(locations, [jax.devices()], shape)
