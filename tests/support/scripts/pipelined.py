"""A tiny job of the trainer whose model is split over hosts.

Usage: pipelined.py WORK_DIR STAGES [loop=own] [pace=SECONDS] [schedule=NAME] [log_bytes=N] [state_bytes_per_s=N]
[rows=N] [tensor=N] [fsdp=N]. The last two are axes of the devices of each host, rows are of a microbatch; `loop=own`
is a loop of the script's. The job reads the order `stop` in WORK_DIR as tiny.py does, makes no pauses between steps
while there is a file `hurry`, and writes `steps-<host>-<pid>.jsonl`: a line per committed step, with the SHA-256 of
the weights and optimizer state of each unit that this host has, and where it has all the digest of the result, if
that were the last step; and `evaluations-<host>-<pid>.jsonl`: a line per evaluation. At the end it prints the digest
of the result.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import resilient_jax as rj
from resilient_jax.state.array_digest import digest_tree
from resilient_jax.trainer import trainer as trainer_module
from resilient_jax.trainer.fit_loop import FitGeneration, FitLoop

WORK, STAGES = Path(sys.argv[1]), int(sys.argv[2])
WORDS = dict(word.split("=") for word in sys.argv[3:])
PACE_S = float(WORDS.get("pace", 0.1))
AXES = {name: int(WORDS[name]) for name in ("tensor", "fsdp") if name in WORDS}
DIM_NAMES = rj.LogicalAxisRules(
    names_by_path=[
        ("*/up/kernel", ("embed", "mlp")),
        ("*/up/bias", ("mlp",)),
        ("*/down/kernel", ("mlp", "embed")),
    ]
)
NEVER = 10**9
EVALUATION_STEPS, EVALUATED = 10, 6
LAYERS, WIDTH, TOKENS, VOCABULARY, MICROBATCHES = 4, 16, 8, 24, 6
ROWS = int(WORDS.get("rows", 2))
PADDING = 4
"""Smaller tokens count as padding: microbatches have different weights."""


class Layer(nnx.Module):
    """A layer with variables that are not trained, as batch normalization has them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.statistics = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mixed = jnp.cumsum(self.norm(x), axis=1) / TOKENS
        return x + self.statistics(self.dropout(self.down(nnx.gelu(self.up(mixed)))))


class Model(nnx.Module):
    """A model with tied embeddings."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.table.attend(x)


def loss(model: Model, batch: dict) -> tuple[rj.WeightedMean, dict]:
    logits, is_real = model(batch["x"]), batch["y"] >= PADDING
    found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    accuracy = rj.WeightedMean(jnp.mean(is_real * (jnp.argmax(logits, -1) == batch["y"])), jnp.mean(is_real))
    spread = jnp.std(logits)  # a mean over microbatches
    return rj.WeightedMean(jnp.sum(found * is_real), jnp.sum(is_real)), {
        "accuracy": accuracy,
        "spread": spread,
    }


def draw(step: int, index: int) -> dict[str, np.ndarray]:
    x, y = np.random.default_rng((step, index)).integers(0, VOCABULARY, (2, ROWS, TOKENS), np.int32)
    return {"x": x, "y": y}


def stop_at() -> int:
    try:
        return int((WORK / "stop").read_text())
    except (OSError, ValueError):
        return NEVER


def digest_unit(unit: object) -> str:
    """Return the digest of a unit, or nothing if another host has it."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(unit):
        if not leaf.addressable_shards:
            return ""
        array = np.empty(leaf.shape, leaf.dtype)
        for shard in leaf.addressable_shards:
            array[shard.index] = np.asarray(shard.data)
        found.update(array.tobytes())
    return found.hexdigest()


def digest_result(units: Sequence[Any]) -> str:
    """Return the digest of the result of a host that has all units."""
    weights = {name: weight for unit in units for name, weight in unit.weights.items()}
    found = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        found.update(f"{name} {digest_tree(weight)}\n".encode())
    return found.hexdigest()


def digest_units(state: Any) -> dict[int, str]:
    """Return the digest of each unit of this host, by number."""
    digests = {number: digest_unit(unit) for number, unit in enumerate(state.units)}
    return {number: found for number, found in digests.items() if found}


def append(kind: str, host_index: int, line: dict) -> None:
    host = os.environ.get("TINY_JOB_HOST", str(host_index))
    with (WORK / f"{kind}-{host}-{os.getpid()}.jsonl").open("a") as log:
        print(json.dumps(line), file=log, flush=True)


def write_step(report: rj.StepReport) -> bool:
    if report.is_evaluation:
        append("evaluations", report.host_index, {"step": report.step, **report.metrics})
        return False
    digests = digest_units(report.state)
    line = {
        "step": report.step - 1,
        "digests": digests,
        "loss": report.metrics["loss"],
        "generation": report.generation,
    }
    if len(digests) == len(report.state.units):
        line["result"] = digest_result(report.state.units)
    append("steps", report.host_index, line)
    if not (WORK / "hurry").exists():
        time.sleep(PACE_S)
    return report.step >= stop_at()


class LoggingLoop(FitLoop):
    """The loop of the trainer, which logs the state that each generation begins with.

    A host that commits a step because another one has committed it calls no callback: only here it is seen that it did.
    """

    def open_generation(self, world: rj.World) -> tuple[FitGeneration, Any]:
        generation, state = super().open_generation(world)
        step = int(state.step)
        if step and not world.is_rehearsal and world.replay is None:
            line = {"step": step - 1, "digests": digest_units(state), "generation": world.generation}
            append("restored", world.host_index, line)
        return generation, state


def train(world: rj.World, train_step: rj.TrainerStep) -> None:
    """Do what `fit` does, and what `write_step` asks for."""
    state = train_step.restore_or_init()

    def report(metrics: dict, *, is_evaluation: bool) -> bool:
        return write_step(
            rj.StepReport(
                step=int(state.step),
                state=state,
                metrics=metrics,
                duration_s=0.0,
                host_index=world.host_index,
                generation=world.generation,
                is_evaluation=is_evaluation,
            )
        )

    for step in world.steps(NEVER):
        if step and step % EVALUATION_STEPS == 0 and not world.is_rehearsal:
            report(train_step.evaluate(state), is_evaluation=True)
        state, metrics = train_step(state, step)
        world.commit(state, **metrics)
        train_step.save(state)
        if report(metrics, is_evaluation=False):
            break
    result = train_step.finish(state)
    print(f"step {result.step} digest {result.params_sha256}", flush=True)


if __name__ == "__main__":
    trainer_module.FitLoop = LoggingLoop
    options: dict[str, Any] = {name: WORDS[name] for name in ("schedule",) if name in WORDS}
    is_own = WORDS.get("loop") == "own"
    trainer = rj.Trainer(
        model=Model,
        optimizer=optax.adamw(optax.linear_schedule(1e-2, 1e-3, 100)),
        loss_fn=loss,
        data=draw,
        batch_size=MICROBATCHES * ROWS,
        microbatch_size=ROWS,
        numerics=rj.Numerics(clip_norm=0.5, ema_decay=0.9),
        parallelism=rj.Parallelism(
            pipeline=rj.Pipeline(
                num_stages=STAGES,
                log_bytes=int(WORDS.get("log_bytes", 2**20)),
                state_bytes_per_s=float(WORDS.get("state_bytes_per_s", 1e9)),
                axis_sizes=AXES,
                logical_axis_rules=DIM_NAMES,
                **options,
            )
        ),
        evaluation=rj.Evaluation(
            data=draw, interval_steps=EVALUATION_STEPS, num_microbatches=EVALUATED, use_ema=True
        ),
        checkpoints=rj.Checkpoints(directory=WORK / "checkpoints", interval_steps=50),
        callbacks=[] if is_own else [write_step],
    )
    if is_own:
        trainer.run(train)
    else:
        result = trainer.fit(NEVER)
        print(f"step {result.step} digest {result.params_sha256}", flush=True)
