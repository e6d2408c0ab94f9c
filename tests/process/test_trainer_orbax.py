"""A checkpoint is saved by one process alone, though Orbax would wait for all of JAX's world."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("trainer_orbax_worker.py")
DEADLINE_S = 90.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_process_other_than_the_first_saves_and_reads_while_the_first_is_stopped(tmp_path):
    port, directory = free_port(), tmp_path / "checkpoints"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(WORKER), str(index), str(port), str(directory)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
            for index in (0, 1)
        ]
        for worker in workers:
            stack.callback(worker.kill)
        stopped, saver = workers
        assert stopped.stdout is not None
        assert stopped.stdout.readline().strip() == str(stopped.pid)
        os.waitpid(stopped.pid, os.WUNTRACED)
        out, err = saver.communicate("go\n", timeout=DEADLINE_S)
        assert saver.returncode == 0, err
        assert out == "connected\nsaved ['5', '7']\n"


LEAVE = """
import gc, sys, weakref
import jax, jax.extend, numpy as np
from jax._src import xla_bridge
from resilient_jax.training.trainer.storage import OrbaxStore
state = {"a": jax.device_put(np.zeros((3, 3), np.float32))}
store = OrbaxStore(sys.argv[1], keep=1)
store.save(1, state)
store.load(1, jax.eval_shape(lambda tree: tree, state))
backends = [weakref.ref(backend) for backend in xla_bridge._backends.values()]
del state
jax.extend.backend.clear_backends()
gc.collect()
sys.exit(any(backend() is not None for backend in backends))
"""


def test_a_save_keeps_nothing_of_a_world_that_is_left(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, str(tmp_path)],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
