"""A job with one error of the user's: faulty.py FAULT. Every step all-reduces a number over the hosts."""

import atexit
import importlib
import os
import signal
import sys
import time
import traceback

import jax
import jax.numpy as jnp

import resilient_jax as rj
from resilient_jax.protocol.worker_messages import WORKER_SETTINGS_VARIABLE

FAULT = sys.argv[1]
BAD_STEP = 5

if FAULT == "import":
    if '"host-1"' in os.environ[WORKER_SETTINGS_VARIABLE]:
        # It still ends when the job ends with the other's error.
        atexit.register(time.sleep, 2.0)
    importlib.import_module("a_module_that_nobody_has")
elif FAULT == "early":
    jax.random.key(0)
elif FAULT == "wrong-argument":
    rj.run(7)  # pyright: ignore[reportArgumentType]
elif FAULT == "killed":
    os.kill(os.getpid(), signal.SIGKILL)


def fail(step: int, host: str) -> None:
    if FAULT == "chatty":
        print("\n".join(100 * "x" for _ in range(20_000)))  # far more than the capacity of a pipe
    if FAULT == "exit-7":
        sys.exit(7)
    if FAULT == "one-host" and host == "host-1":
        raise ValueError(f"bad batch at step {step}")
    if FAULT == "all-hosts":
        raise ValueError(f"bad batch at step {step}")
    if FAULT == "printed":
        traceback.print_exception(ValueError(f"bad batch at step {step}"))
    if FAULT == "collective":
        raise jax.errors.JaxRuntimeError("INTERNAL: Gloo all-reduce failed: connection reset")


def compute(microbatch: rj.Microbatch) -> jax.Array:
    if FAULT == "in-loss" and (microbatch.step, microbatch.index) == (BAD_STEP, 3):
        step = microbatch.step
        raise ValueError(f"bad batch at step {step}")
    return jnp.ones(())


def train(world: rj.World) -> None:
    state = world.restore_or_init(lambda: jnp.zeros(()))
    zeros = jax.device_put(jnp.zeros(()), world.local_devices[0])
    for step in world.steps(20):
        if step == BAD_STEP:
            fail(step, world.host)
        state = state + world.accumulate_microbatches(4, compute, zeros)
        world.commit(state)


if __name__ == "__main__" and FAULT != "no-run":
    rj.run(train)
    if FAULT == "twice":
        rj.run(train)
