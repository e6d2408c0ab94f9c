"""A script that trains three steps, then works until the file end-HOST exists in the folder of its argument.

With `crash` as a second argument the process crashes after its script, as a library may at Python's shutdown. Its last
work is a program that JAX compiles, as an evaluation of the trained model would be.
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import resilient_jax as rj

folder = Path(sys.argv[1])
hosts: list[str] = []
if sys.argv[2:] == ["crash"]:
    atexit.register(os.kill, os.getpid(), signal.SIGSEGV)  # the first registered is the last called


def train(world: rj.World) -> None:
    hosts[:] = [world.host]
    state = world.restore_or_init(lambda: jnp.zeros(3))
    for _ in world.steps(3):
        state = state + 1
        world.commit(state)


rj.run(train)
(folder / f"works-{hosts[0]}").write_text(str(os.getpid()))
while not (folder / f"end-{hosts[0]}").exists():
    time.sleep(0.02)
assert jax.jit(lambda x: x @ x)(jnp.arange(3.0)) == 5
print("saved", flush=True)
