"""`run(train_fn)`: the entry point of a training script, with or without an agent."""

import contextlib
import logging
import os
import warnings
from collections.abc import Sequence

import jax

from resilient_jax.argument_checks import describe_value, find_refused_call
from resilient_jax.errors import EXHAUSTION_ERRNOS, CallerError, ConfigError, MessageError
from resilient_jax.ids import GenerationNumber, HostName, ProcessIndex
from resilient_jax.jax_runtime.distributed import is_backend_initialized
from resilient_jax.jax_runtime.distributed_refusal import check_not_initialized, refuse_under_agent
from resilient_jax.protocol.generation import WorldChange
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.protocol.replay import ReplayOrder, find_replay_order
from resilient_jax.protocol.worker_messages import (
    AGENT_CONNECTION_VARIABLE,
    DEATH_PIPE_VARIABLE,
    RESTART_EXIT_CODE,
    WORKER_SETTINGS_DECODER,
    WORKER_SETTINGS_VARIABLE,
    WorkerSettings,
)
from resilient_jax.step.reducer import Reducer
from resilient_jax.worker.checkpoint_poller import FindLatestCheckpoint
from resilient_jax.worker.committed_state import CommittedState
from resilient_jax.worker.generation_info import GenerationInfo
from resilient_jax.worker.ledger import Ledger
from resilient_jax.worker.observers import LedgerObserver, Observer
from resilient_jax.worker.replay import make_replay, run_replay
from resilient_jax.worker.session import Session
from resilient_jax.worker.standalone import StandaloneControl
from resilient_jax.worker.worker import TrainFunction, Worker
from resilient_jax.worker.world import World

logger = logging.getLogger(__name__)

_has_run = False
_is_warned = False


def run(train_fn: TrainFunction, *, find_latest_checkpoint: FindLatestCheckpoint | None = None) -> None:
    """Train until `train_fn` has returned on every host; survive the death of any of them.

    Under an agent (`resilient-jax launch`, `resilient-jax agent`), `run` calls `train_fn(world)` again in every
    generation, in the same process, and returns when the job is done. If training was done without this process,
    because it joined too late, `run` ends the process instead (SystemExit). Without an agent (`python script.py`),
    `run` calls `train_fn` once, with this machine as the only host.

    Args:
        train_fn: takes a `World`; loops over `world.steps(...)`, restores with `world.restore_or_init` and
            commits with `world.commit`. It may be unwound at any call into JAX or `world`, by an exception.
        find_latest_checkpoint: a function, for a `train_fn` that saves checkpoints; returns the step of the newest
            finished one on storage, None if there is none. If the state is lost in the memory of all hosts, the job
            then resumes by itself where `world.is_fresh`: `train_fn` must load a checkpoint there and call
            `world.resume_at(step)`. Called on another thread while the worker waits; must look at storage only, and
            touch no device.

    Raises:
        Exception: whatever `train_fn` raises by its own fault, once; the job ends with it.
        CallerError: an argument is no function with such parameters; the script has called
            `jax.distributed.initialize`; under an agent: a second call, or JAX's devices are in use already.

    Example:
        >>> import resilient_jax as rj
        >>> def train(world):
        ...     state = world.restore_or_init(init_state)
        ...     for step in world.steps(1000):
        ...         state = step_fn(state, batch_at(step))
        ...         world.commit(state)
        >>> rj.run(train)  # doctest: +SKIP
    """
    global _has_run
    _check_arguments(train_fn, find_latest_checkpoint)
    if _has_run:
        raise CallerError(
            "run: found a second call in a process that an agent started, expected one: the job is over for its agent "
            "when the first returns. Do everything in one call (a Trainer's fit is one, too), or launch another job"
        )
    check_not_initialized()
    refuse_under_agent()
    # Taken out of the environment: a process that the script starts must not take itself for this worker.
    descriptor = os.environ.pop(AGENT_CONNECTION_VARIABLE, None)
    encoded_settings = os.environ.pop(WORKER_SETTINGS_VARIABLE, None)
    if descriptor is None or encoded_settings is None:
        _warn_of_early_arrays()
        _run_standalone(train_fn)
        return
    # Not set above: a script that runs without an agent may call this again.
    _has_run = True
    if is_backend_initialized():
        raise CallerError(
            "run: found that this script has used JAX's devices already, expected none in use: they come with a world, "
            "and go with it. Make arrays inside `train`, or in the function that `restore_or_init` or the trainer "
            "calls; a jax.random.key or a Flax model at the top of a script is arrays, too"
        )
    settings = _decode_settings(encoded_settings)
    death_pipe = os.environ.pop(DEATH_PIPE_VARIABLE, None)
    with contextlib.closing(Worker(int(descriptor), settings, find_latest_checkpoint)) as worker:
        try:
            worker.run(train_fn, int(death_pipe) if death_pipe is not None else None)
        except OSError as error:
            if error.errno not in EXHAUSTION_ERRNOS:
                raise
            # Not the script's: what `train_fn` raises is reported, and does not come here.
            logger.error("%s: this worker ends, to be started again: %s", settings.host, error)
            raise SystemExit(RESTART_EXIT_CODE) from None


def _decode_settings(encoded: str) -> WorkerSettings:
    source = f"the environment variable {WORKER_SETTINGS_VARIABLE}"
    try:
        return decode_message(WORKER_SETTINGS_DECODER, encoded.encode("utf-8", "surrogateescape"), source)
    except MessageError as error:
        raise ConfigError(f"{error}. Only an agent starts a worker, and sets it") from error


def _check_arguments(train_fn: object, find_latest_checkpoint: object) -> None:
    if not callable(train_fn):
        raise CallerError(
            f"run: found {describe_value(train_fn)}, expected a function train(world), which run calls: rj.run(train), "
            "not rj.run(train())"
        )
    if (signature := find_refused_call(train_fn, 1)) is not None:
        raise CallerError(
            f"run: found a function of {signature}, expected train(world), with one parameter. Bind others in a "
            "lambda: rj.run(lambda world: train(world, options))"
        )
    if find_latest_checkpoint is not None and (
        not callable(find_latest_checkpoint) or find_refused_call(find_latest_checkpoint, 0) is not None
    ):
        raise CallerError(
            f"run: found {describe_value(find_latest_checkpoint)} as find_latest_checkpoint, expected a function "
            "without parameters that returns a step or None"
        )


def _warn_of_early_arrays() -> None:
    """Warn, in the first run of a script without an agent, of what is refused under one."""
    global _is_warned
    if is_backend_initialized() and not _is_warned:
        warnings.warn(
            "JAX's devices are in use before rj.run or fit, which `resilient-jax launch` refuses: make arrays, keys "
            "and models inside of the functions that are passed to it",
            stacklevel=3,
        )
    _is_warned = True


def _run_standalone(train_fn: TrainFunction) -> None:
    host = HostName("localhost")
    info = GenerationInfo(
        number=GenerationNumber(1),
        hosts=(host,),
        process_index=ProcessIndex(0),
        change=str(WorldChange.REFORM),
        reason="started without an agent",
    )
    ledger = Ledger.from_environment(host)
    observers: list[Observer] = [] if ledger is None else [LedgerObserver(ledger, info)]
    if (order := find_replay_order()) is None:
        train_fn(_make_lone_world(info, StandaloneControl(host), observers))
        return
    replay_control, replay_observers = make_replay(order, info)
    world = _make_lone_world(info, replay_control, [*observers, *replay_observers], order)
    run_replay(order, lambda: train_fn(world))


def _make_lone_world(
    info: GenerationInfo,
    control: StandaloneControl,
    observers: Sequence[Observer],
    replay: ReplayOrder | None = None,
) -> World:
    committed = CommittedState()
    session = Session(committed, control, observers=observers)
    reducer = Reducer(jax.devices, info.process_index, committed.contributions, session)
    return World(info, session, control, reducer, replay=replay)
