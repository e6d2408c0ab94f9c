"""Process `index` of a world of two. Process 1 saves and reads a checkpoint, while process 0 is stopped for good."""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.training.trainer.storage import OrbaxStore


def main(index: int, port: int, directory: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    assert jax.process_count() == 2
    if index == 0:
        print(os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    print("connected", flush=True)
    sys.stdin.readline()
    here = NamedSharding(Mesh(np.array(jax.local_devices()), ("data",)), P())
    state = {
        "wide": jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3), here),
        "narrow": (jax.device_put(jnp.bfloat16(1.5), here), jax.device_put(np.int32(7), here)),
        "key": jax.device_put(jax.random.key(5), here),
    }
    store = OrbaxStore(directory, keep=2)
    for step in (3, 5, 7):
        store.save(step, state)
    assert store.find_newest() == 7
    found = store.load(7, jax.eval_shape(lambda tree: tree, state))
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        assert one.dtype == other.dtype
        assert bool(jnp.all(jax.device_get(one) == jax.device_get(other)))
    print("saved", sorted(os.listdir(directory)), flush=True)
    os._exit(0)  # leaving the world would wait for process 0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
