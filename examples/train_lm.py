"""Trains a small language model on the sources of Python's standard library, and survives kills.

    resilient-jax launch --hosts 4 --devices-per-host 2 examples/train_lm.py --steps 100

`train` is called again after every change of membership. What makes that safe: the state goes through
`world`, and microbatch i of step s is a pure function of (seed, s, i).
"""

import argparse
import sys
from pathlib import Path

import jax
from byte_lm.settings import Settings
from byte_lm.step import accumulate, apply_total, digest_params, init_state, init_total, mean_over_devices
from byte_lm.text import Bytes, draw_microbatch, read_standard_library
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from resilient_jax.config import load, override
from resilient_jax.errors import ConfigError

DEFAULT_CONFIG = Path(__file__).resolve().parents[1] / "configs" / "lm_tiny.toml"


def train(world: rj.World, settings: Settings, text: Bytes, *, digest: bool) -> None:
    """Trains from the last committed step to the last one, with the hosts that are there now."""
    mesh = world.local_mesh(("data",))
    check_microbatch(settings, mesh.size)
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    state = world.restore_or_init(lambda: init_state(settings), sharding=everywhere)
    zeros = jax.device_put(init_total(settings, devices=mesh.size), split)
    for step in world.steps(settings.steps):
        total = zeros
        for index in world.share(settings.microbatches):
            batch = draw_microbatch(
                text,
                (settings.seed, step, index),
                sequences=settings.sequences,
                context=settings.model.context,
            )
            total = accumulate(total, state.params, jax.device_put(batch, split), model=settings.model)
        state = apply_total(state, world.sum(mean_over_devices(total)), settings=settings)
        world.commit(state, loss=float(state.loss))

    if world.host_index == 0:
        print(f"final loss {float(state.loss):.6f} after {settings.steps} steps")
        if digest:
            print(f"sha256 of the parameters {digest_params(state.params)}")


def check_microbatch(settings: Settings, devices: int) -> None:
    """Refuses a microbatch that cannot be spread evenly over one host's devices."""
    if settings.sequences % devices:
        raise ConfigError(
            f"key 'sequences': found {settings.sequences}, expected a multiple of {devices}, the devices of "
            "this host. Change it in the configuration, or give each host another number of devices."
        )


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Gives the settings of the file, with those that flags replace."""
    flags = {name: getattr(arguments, name) for name in ("steps", "seed")}
    changes = {name: value for name, value in flags.items() if value is not None}
    return override(load(arguments.config, Settings), changes, source="command line")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level language model that survives kills.")
    parser.add_argument("--config", default=str(DEFAULT_CONFIG), help="TOML file (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps to train, instead of the file's")
    parser.add_argument("--seed", type=int, help="seed of parameters and data, instead of the file's")
    parser.add_argument("--digest", action="store_true", help="print the SHA-256 of the final parameters")
    return parser.parse_args()


def main() -> int:
    """Runs the example; gives its exit code."""
    arguments = parse_arguments()
    try:
        settings = read_settings(arguments)
        text = read_standard_library(settings.text.max_bytes)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    rj.run(lambda world: train(world, settings, text, digest=arguments.digest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
