"""The groups of options that `Trainer` takes, with an example of each for the error that refuses something else."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from resilient_jax.argument_checks import describe_value, find_refused_call
from resilient_jax.errors import CallerError
from resilient_jax.trainer.checkpoints import Checkpoints
from resilient_jax.trainer.directory_checks import expand_home
from resilient_jax.trainer.early_stopping import EarlyStopping
from resilient_jax.trainer.evaluation import Evaluation
from resilient_jax.trainer.fit_config import Parallelism, ReadOptions
from resilient_jax.trainer.numerics import Numerics
from resilient_jax.trainer.planner import Planner


class OptionGroup(NamedTuple):
    """What an argument may be.

    Attributes:
        example: a right argument, as a user writes it.
        is_optional: whether it may be None.
    """

    type: type
    example: str
    is_optional: bool


OPTION_GROUPS: Final = {
    "numerics": OptionGroup(Numerics, "rj.Numerics(compute_dtype=jnp.bfloat16)", is_optional=False),
    "parallelism": OptionGroup(Parallelism, 'rj.Parallelism(state="sharded")', is_optional=False),
    "read_options": OptionGroup(ReadOptions, "rj.ReadOptions(shuffle=False)", is_optional=False),
    "planner": OptionGroup(Planner, 'rj.Planner(topology="meshes/mine.toml")', is_optional=True),
    "evaluation": OptionGroup(Evaluation, "rj.Evaluation(data=..., interval_steps=100)", is_optional=True),
    "early_stopping": OptionGroup(EarlyStopping, "rj.EarlyStopping(patience=3)", is_optional=True),
    "checkpoints": OptionGroup(Checkpoints, 'rj.Checkpoints(directory="/data/run")', is_optional=True),
}


def check_option_groups(**arguments: object) -> None:
    """Check that each argument is of its group.

    Raises:
        CallerError: an argument is of another type; the message names the first, with an example of a right one.
    """
    for name, found in arguments.items():
        group = OPTION_GROUPS[name]
        if not isinstance(found, group.type) and not (found is None and group.is_optional):
            raise CallerError(
                f"{name}: found {describe_value(found)}, expected rj.{group.type.__name__}"
                f"{' or None' if group.is_optional else ''}. Write {name}={group.example}"
            )


def check_callbacks(callbacks: object) -> None:
    """Check that `callbacks` is a sequence of functions of one argument.

    Raises:
        CallerError: `callbacks` is no such sequence.
    """
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise CallerError(
            f"callbacks: found {describe_value(callbacks)}, expected a list of functions callback(report). Write "
            "callbacks=[...], also for a single one"
        )
    for number, callback in enumerate(callbacks):
        if not callable(callback):
            raise CallerError(
                f"callbacks[{number}]: found {describe_value(callback)}, expected a function callback(report)"
            )
        if (signature := find_refused_call(callback, 1)) is not None:
            raise CallerError(
                f"callbacks[{number}]: found a function of {signature}, expected one that takes the StepReport alone: "
                "its step, metrics and state are attributes"
            )


def check_log_directory(directory: object) -> str | Path | None:
    """Return `log_directory` if it is None, or a directory that this process can create and write to, without a `~`.

    A directory that is missing is created. Whether the disk has space is not checked: a full one stops no training.

    Raises:
        CallerError: `directory` is no such directory.
    """
    if directory is None:
        return None
    if not isinstance(directory, str | Path):
        raise CallerError(
            f"log_directory: found {describe_value(directory)}, expected the path of a directory, or None"
        )
    directory = expand_home(directory)
    path, advice = Path(directory), "Each host writes a file of its own there; choose another path"
    if path.exists() and not path.is_dir():
        raise CallerError(f"log_directory: found the file {path}, expected a directory. {advice}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CallerError(
            f"log_directory: found {path}, which cannot be created ({error.strerror}), expected a directory. {advice}"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise CallerError(
            f"log_directory: found the directory {path}, which this user may not write to, expected one to write to. "
            f"{advice}, or change its permissions"
        )
    return directory
