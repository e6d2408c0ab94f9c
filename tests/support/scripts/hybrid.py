"""A job with hybrid sharding on a mesh of all hosts: replicated over hosts, sharded over the devices of each.

Usage: hybrid.py WORK_DIR. The job trains until WORK_DIR has a file `stop`; then each host writes `final-<host>.json`:
the steps done, and the least and greatest element of the weights, which count the steps, too.
"""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj

WORK = Path(sys.argv[1])
NEVER, PACE_S = 10**9, 0.05


def init_state() -> dict[str, jax.Array]:
    return {"weights": jnp.zeros((16, 4)), "more": jnp.zeros(8)}


@jax.jit
def update(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(lambda number: number + 1, state)


def train(world: rj.World) -> None:
    mesh = world.mesh({"hosts": len(world.hosts), "local": -1})
    state = world.restore_or_init(init_state, sharding=NamedSharding(mesh, P("local")))
    for step in world.steps(NEVER):
        is_last = world.all_reduce(jnp.array([(WORK / "stop").exists()], jnp.int32)) == len(world.hosts)
        if is_last:
            numbers = [shard.data for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
            found = {
                "steps": step,
                "least": min(float(n.min()) for n in numbers),
                "most": max(float(n.max()) for n in numbers),
            }
            (WORK / f"final-{world.host}.json").write_text(json.dumps(found))
            return
        state = update(state)
        world.commit(state)
        world.snapshot(state)
        time.sleep(PACE_S)


if __name__ == "__main__":
    rj.run(train)
