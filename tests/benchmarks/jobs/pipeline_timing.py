"""How well the stages of a pipeline in one process are used, and what memory they need beside what their plan says.

Usage: pipeline_timing.py sleeps|example STAGES MICROBATCHES STEPS, with as many CPU devices as stages. Prints a line of
JSON: `efficiency`, the makespan of the simulated order with the tasks' measured seconds over that which was measured
(median of steps), and `memory`: estimated and measured bytes of the fullest device.

`sleeps`: a model that computes nearly nothing, and each task sleeps equally long.
"""

import contextlib
import json
import statistics
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from byte_lm.model import ByteLM
from byte_lm.objective import loss as example_loss
from byte_lm.objective import make_optimizer
from byte_lm.settings import Settings
from byte_lm.text import draw_microbatch, read_standard_library
from flax import nnx

import resilient_jax as rj
from resilient_jax.config import load_toml
from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.task_orders import order_tasks
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.plan_request import PlanConstraints
from resilient_jax.topology import Accelerator, Host, LinkLevel, NumberFormat, Peak, Port, Topology
from tests.benchmarks.paths import REPOSITORY
from tests.support.plan_searches import search_plans

KIND, STAGES, MICROBATCHES, STEPS = sys.argv[1], *map(int, sys.argv[2:5])
SLEEP_S, WARM_STEPS = 0.02, 2
WIDTH, ROWS = 8, 2
SETTINGS = REPOSITORY / "configs/lm_tiny_pipelined.toml"
TERMS = ("parameters", "gradients", "optimizer", "activations", "working", "gathers")


class Sleeper(nnx.Module):
    """As many layers as stages."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(STAGES)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def sleeper_loss(model, batch):
    return jnp.mean(model(batch))


def make_topology():
    """Return a machine with one device for each stage; only its memory matters, and that it has enough."""
    accelerator = Accelerator(
        name="core",
        peaks=(Peak(number_format=NumberFormat.FP32, flops_per_s=1e10),),
        memory_bytes=2**34,
        memory_bandwidth_bytes_per_s=1e10,
    )
    level = LinkLevel(name="host", bandwidth_bytes_per_s=1e9, port=Port.DEVICE, latency_s=1e-6)
    host = Host(name=HostName("host-00"), accelerator=accelerator, devices=STAGES)
    return Topology(name="one machine", levels=(level,), hosts=(host,))


def make_sleeper():
    """Return model, loss, optimizer, rows of a microbatch, and a function that draws one."""

    def draw(step, index):
        return np.full((ROWS, WIDTH), 1.0 + step + index, np.float32)

    return Sleeper, sleeper_loss, optax.sgd(0.0), ROWS, draw


def make_example():
    """Return the same of the example."""
    settings = load_toml(SETTINGS, Settings)
    text, rows = read_standard_library(settings.text.max_bytes), settings.sequences

    def draw(step, index):
        key = (settings.seed, step, index)
        return draw_microbatch(text, key, sequences=rows, context=settings.model.context)

    def model(rngs):
        return ByteLM(settings.model, rngs)

    return model, example_loss, make_optimizer(settings.optimizer), rows, draw


def make_program():
    """Return the pipeline, and a function that draws the batch of a step."""
    model, loss, optimizer, rows, draw = make_sleeper() if KIND == "sleeps" else make_example()
    trainer = rj.Trainer(
        model=model,
        optimizer=optimizer,
        loss_fn=loss,
        data=draw,
        batch_size=MICROBATCHES * rows,
        microbatch_size=rows,
        numerics=rj.Numerics(clip_norm=1.0),
    )
    cost = rj.planning.analyze_program(model, loss, draw(0, 0), name=KIND, optimizer=optimizer)
    axes = dict.fromkeys(Axis, 1) | {Axis.PIPELINE: STAGES}
    (plan,) = search_plans(
        cost,
        make_topology(),
        global_batch=MICROBATCHES * rows,
        constraints=PlanConstraints(axes, MicrobatchConfig(sequences=rows)),
        calibration=Calibration(staging_bytes=0.0),
    )

    def draw_batch(step):
        parts = [draw(step, index) for index in range(MICROBATCHES)]
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)

    return trainer.compile_plan(plan, devices=jax.devices()), draw_batch


def find_efficiency(program):
    """Return the simulated over the measured time of the tasks of the last step.

    Simulated with the mean seconds of each stage's tasks of each kind.
    """
    seconds, blocks = {}, {}
    for name, work in program.last_step.items():
        for task, took_s in work.task_seconds.items():
            seconds.setdefault((name, task.kind), []).append(took_s)
            blocks[name] = len(task.hop.blocks)
    means = {key: statistics.fmean(found) for key, found in seconds.items()}
    orders = order_tasks(
        program.routes,
        lambda host, kind, block: means.get((host, kind), 0.0) / blocks[host],
        schedule=PipelineSchedule.ZERO_BUBBLE,
    )
    return orders.makespan_s / max(work.tasks_end_s for work in program.last_step.values())


def make_tasks_sleep(program):
    """Have each task of each stage sleep on the thread of its stage."""
    for worker in program._workers.values():
        runner = worker._runner
        execute = runner._execute

        def sleep(*arguments, execute=execute):
            sent = execute(*arguments)
            time.sleep(SLEEP_S)
            return sent

        runner._execute = sleep


class MemoryPeaks:
    """The most bytes of arrays on each device, as seen before each task and after the update of each unit."""

    def __init__(self):
        self.peaks, self._lock = {}, threading.Lock()

    def look(self, *_):
        """Count each buffer once, whichever arrays share it."""
        with self._lock:
            found = {}
            for array in jax.live_arrays():
                with contextlib.suppress(RuntimeError):  # another stage has just donated it
                    for shard in array.addressable_shards:
                        place = shard.data.unsafe_buffer_pointer()
                        found.setdefault(shard.device.id, {})[place] = shard.data.nbytes
            for device, buffers in found.items():
                self.peaks[device] = max(self.peaks.get(device, 0), sum(buffers.values()))

    def look_at_updates(self, program):
        """Look after each unit's update, on the thread of its stage, from now on."""
        for worker in program._workers.values():
            state = worker.state

            def make_next(*arguments, make_next=state.make_next):
                found = make_next(*arguments)
                self.look()
                return found

            state.make_next = make_next


def main():
    program, draw_batch = make_program()
    if KIND == "sleeps":
        make_tasks_sleep(program)
    state, efficiencies = program.init(), []
    for step in range(WARM_STEPS + STEPS):
        state, _ = program(state, draw_batch(step))
        if step >= WARM_STEPS:
            efficiencies.append(find_efficiency(program))
    peaks = MemoryPeaks()
    peaks.look_at_updates(program)
    state, _ = program(state, draw_batch(0), before_task=peaks.look)
    line = {
        "efficiency": statistics.median(efficiencies),
        "efficiency_least": min(efficiencies),
        "busy_share": sum(work.busy_s for work in program.last_step.values())
        / (STAGES * max(work.tasks_end_s for work in program.last_step.values())),
        "memory_estimated": program.plan.memory.total,
        "memory_terms": {name: getattr(program.plan.memory, name) for name in TERMS},
        "memory_measured": max(peaks.peaks.values()),
        "state_bytes": max(count_state_bytes(state).values()),
    }
    program.close()
    print(json.dumps(line), flush=True)


def count_state_bytes(state):
    """Return the bytes of the state on each device."""
    found = {}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
    return found


if __name__ == "__main__":
    main()
