"""Trains a small language model on the sources of Python's standard library, and survives the loss of hosts.

    resilient-jax launch --hosts 4 --devices-per-host 2 examples/train_lm.py --steps 100
    resilient-jax launch --hosts 4 examples/train_lm.py --checkpoints /tmp/lm --checkpoint-interval-steps 20

The loss is written for one microbatch, as for one device; the trainer does the rest. When any host is killed, the final
weights are bit-identical.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from byte_lm.model import ByteLM
from byte_lm.objective import loss, make_optimizer
from byte_lm.settings import Settings
from byte_lm.text import Bytes, draw_microbatch, read_standard_library

import resilient_jax as rj
from resilient_jax.config import load_toml, override_values
from resilient_jax.errors import CallerError

DEFAULT_CONFIG = Path(__file__).resolve().parents[1] / "configs" / "lm_tiny.toml"


def make_trainer(
    settings: Settings,
    text: Bytes,
    folder: Path,
    checkpoints: rj.Checkpoints | None = None,
    callbacks: Sequence[rj.Callback] = (),
) -> rj.Trainer:
    """Return the trainer, without touching a device; paths in the settings are relative to `folder`."""

    def draw(step: int, index: int) -> Bytes:
        key = (settings.seed, step, index)
        return draw_microbatch(text, key, sequences=settings.sequences, context=settings.model.context)

    return rj.Trainer(
        model=lambda rngs: ByteLM(settings.model, rngs),
        optimizer=make_optimizer(settings.optimizer),
        loss_fn=loss,
        data=draw,
        batch_size=settings.microbatches * settings.sequences,
        microbatch_size=settings.sequences,
        seed=settings.seed,
        numerics=rj.Numerics(clip_norm=settings.optimizer.clip_norm),
        checkpoints=checkpoints,
        callbacks=callbacks,
        **choose_parallelism(settings, folder),
    )


def choose_parallelism(settings: Settings, folder: Path) -> dict[str, Any]:
    """Return the trainer's parallelism, or the planner that searches a plan for the live hosts."""
    if settings.plan.topology is not None:
        topology, plan = folder / settings.plan.topology, settings.plan
        return {
            "planner": rj.Planner(
                topology=topology,
                calibrate=plan.calibrate,
                compile_ahead=plan.compile_ahead,
                spans_hosts=plan.spans_hosts,
            )
        }
    if settings.pipeline.stages is not None:
        return {"parallelism": rj.Parallelism(pipeline=rj.Pipeline(num_stages=settings.pipeline.stages))}
    if settings.mesh.fsdp is not None:
        return {"parallelism": rj.Parallelism(axes={"fsdp": settings.mesh.fsdp})}
    # The model is small: each device is a replica, without communication inside a microbatch.
    replicas = rj.ReplicaShape(per_host="devices")
    return {"parallelism": rj.Parallelism(replica_shape=replicas, state=settings.state.parallelism)}


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of the file, overridden by flags."""
    flags = {name: getattr(arguments, name) for name in ("steps", "seed")}
    changes = {name: value for name, value in flags.items() if value is not None}
    return override_values(load_toml(arguments.config, Settings), changes, source="command line")


def read_checkpoints(arguments: argparse.Namespace) -> rj.Checkpoints | None:
    """Return the checkpoint options; None without `--checkpoints`."""
    if arguments.checkpoints is None:
        return None
    return rj.Checkpoints(directory=arguments.checkpoints, interval_steps=arguments.checkpoint_interval_steps)


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level language model that survives kills.")
    parser.add_argument("--config", default=str(DEFAULT_CONFIG), help="TOML file (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps to train, instead of the file's")
    parser.add_argument("--seed", type=int, help="seed of parameters and data, instead of the file's")
    parser.add_argument(
        "--checkpoints", metavar="FOLDER", help="keep checkpoints there, and resume from the newest"
    )
    parser.add_argument(
        "--checkpoint-interval-steps", type=int, default=50, metavar="STEPS", help="default: %(default)s"
    )
    parser.add_argument(
        "--pause-s", type=float, default=0.0, help="seconds to wait after each step, to watch a fast machine"
    )
    parser.add_argument("--digest", action="store_true", help="print the SHA-256 of the final parameters")
    return parser.parse_args()


def main() -> int:
    """Run the example, and return its exit code."""
    arguments = parse_arguments()
    try:
        settings = read_settings(arguments)
        text = read_standard_library(settings.text.max_bytes)
        checkpoints = read_checkpoints(arguments)
    except CallerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    folder = Path(arguments.config).resolve().parent
    pauses = [lambda report: time.sleep(arguments.pause_s)] if arguments.pause_s else []
    result = make_trainer(settings, text, folder, checkpoints, pauses).fit(settings.steps)
    if result.host_index == 0:
        print(f"final loss {result.metrics['loss']:.6f} after {result.step} steps")
        if arguments.digest:
            print(f"sha256 of the parameters {result.params_sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
