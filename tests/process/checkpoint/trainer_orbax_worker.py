"""A process that uses a store of checkpoints. Usage: trainer_orbax_worker.py ROLE DIRECTORY [INDEX PORT].

member: is process INDEX of a world of two. Process 1 saves and reads a checkpoint, while process 0 is suspended.
share: is process INDEX of a world of two, and loads its shards of a state that is sharded over both.
leave: leaves its world while a save is in flight.
save: saves one step after another until it is killed.
"""

import gc
import os
import signal
import sys
import tracemalloc
import weakref

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.checkpoint import array_reads, orbax_store
from resilient_jax.checkpoint.stored_tree import allocate_memory
from resilient_jax.sharding.placements import fully_sharded
from tests.support.whole_checkpoints import WholeStore


def member(directory: str, index: int, port: int) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    assert jax.process_count() == 2
    print("connected", flush=True)
    sys.stdin.readline()  # wait for both: process 1 connects to a service in process 0
    if index == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    here = NamedSharding(Mesh(np.array(jax.local_devices()), ("data",)), P())
    state = {
        "wide": jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3), here),
        "narrow": (jax.device_put(jnp.bfloat16(1.5), here), jax.device_put(np.int32(7), here)),
        "key": jax.device_put(jax.random.key(5), here),
    }
    store = WholeStore(directory, max_to_keep=2)
    for step in (3, 5, 7):
        store.save(step, state)
    assert store.find_newest_step() == 7
    found = store.load(7, jax.eval_shape(lambda tree: tree, state))
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        assert one.dtype == other.dtype
        assert bool(jnp.all(jax.device_get(one) == jax.device_get(other)))
    store.close()
    print("saved", sorted(os.listdir(directory)), flush=True)
    os._exit(0)  # leaving the world would wait for process 0


def share(directory: str, index: int, port: int) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("host", "local"))
    rng = np.random.default_rng(0)
    state = {
        "wide": rng.random((512, 4096), np.float32),
        "tall": rng.random((4096, 512), np.float32),
        "odd": rng.random((4098, 255), np.float32),
        "small": np.arange(6, dtype=np.float32),
        "key": jax.random.key(5),
    }
    abstract = jax.eval_shape(lambda tree: tree, state)
    store = WholeStore(directory, max_to_keep=2)
    if index == 0:
        store.save(3, state)
    multihost_utils.sync_global_devices("saved")

    whole_bytes = sum(leaf.nbytes for name, leaf in state.items() if name != "key")
    allocated: list[int] = []
    orbax_store.allocate_memory = lambda size: allocated.append(size) or allocate_memory(size)
    array_reads.BATCH_BYTES = 2**20
    tracemalloc.start()
    found = store.load(3, abstract, fully_sharded(mesh))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    shares = 0
    for name, array in found.items():
        if name == "key":
            assert jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            assert np.array_equal(
                jax.random.key_data(array).addressable_data(0), jax.random.key_data(state["key"])
            )
            continue
        boxes = {str(shard.index): shard for shard in array.addressable_shards}
        for shard in boxes.values():
            assert np.array_equal(np.asarray(shard.data), state[name][shard.index])
        shares += sum(shard.data.nbytes for shard in boxes.values())
        assert array.sharding == fully_sharded(mesh)(name, abstract[name])
        assert name == "small" or array.sharding.is_fully_replicated is False
    assert store.bytes_read == shares + 8  # the data of the random key
    assert shares < whole_bytes / 2 + 100
    # The transfer memory has room for a batch or this host's shards of one array; the peak is that and all its shards.
    (transfer_bytes,) = allocated
    assert transfer_bytes <= max(2**20, state["wide"].nbytes // 2) + 64 * 5
    assert peak_bytes < shares + 2**18
    store.close()
    print("has its share", flush=True)
    multihost_utils.sync_global_devices("done")


def find_storage_process(store: WholeStore) -> int:
    connection = store._client._connection
    assert connection is not None
    return connection.pid


def leave(directory: str) -> None:
    numbers = np.arange(1000, dtype=np.float32)
    state = {"a": jax.device_put(numbers)}
    store = WholeStore(directory, max_to_keep=1)
    store.save(1, state)
    os.kill(find_storage_process(store), signal.SIGSTOP)
    store.try_save(2, state)
    backends = [weakref.ref(backend) for backend in xla_bridge._backends.values()]
    del state
    jax.extend.backend.clear_backends()
    gc.collect()
    assert backends
    assert all(backend() is None for backend in backends)
    store.poll_save()
    assert store.is_saving
    os.kill(find_storage_process(store), signal.SIGCONT)
    store.wait_until_saved()
    found = store.load(2, {"a": jax.ShapeDtypeStruct((1000,), np.float32)})
    assert np.array_equal(found["a"], numbers)
    store.close()


def save(directory: str) -> None:
    state = {"a": jnp.asarray(np.random.default_rng(0).random(2_000_000, np.float32))}
    store = WholeStore(directory, max_to_keep=2)
    step = max(store.list_directory().steps, default=0)
    while True:
        step += 1
        store.try_save(step, state)
        print(find_storage_process(store), flush=True)
        store.wait_until_saved()


if __name__ == "__main__":
    {"member": member, "share": share, "leave": leave, "save": save}[sys.argv[1]](
        sys.argv[2], *map(int, sys.argv[3:])
    )
