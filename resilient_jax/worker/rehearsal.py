"""The rehearsal: a worker that is about to join runs a step alone, while the others train without it.

What a worker's first step takes is not computing, but tracing, loading programs, and their first use: seconds in which
all others would wait. So the train function is called in a world that looks like the next generation, and is unwound at
its first commit:

- the state has the shapes of the user's own `init` and made-up numbers, which cost no program: this worker will never
  need what `init` computes. It is placed as a restored one;
- this host's devices compute one microbatch of each accumulation, and the update;
- what needs the other hosts is loaded and not run (`collective_thread.rehearse`): its result is zeros;
- nothing is counted, recorded or kept, except for the programs.

A rehearsal that fails is repeated with the initial state, which a script may rely on, by a check for NaN for example.
One that fails again, or that waits for the other hosts by a way of the script's own, is given up: the worker joins all
the same, and loads the rest then.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import jax

from resilient_jax.ids import HostName, ProcessIndex
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.jax_runtime.compilation_state import is_compiling
from resilient_jax.jax_runtime.failures import RehearsalFailed, is_collective_failure
from resilient_jax.policy.failure_forecast import estimate_rate
from resilient_jax.protocol.state_records import StatePart
from resilient_jax.protocol.worker_messages import StepCommitted, TakeSeat
from resilient_jax.step.assignment import count_devices_by_host
from resilient_jax.step.reducer import Reducer
from resilient_jax.worker.committed_state import CommittedState, KeptArrays
from resilient_jax.worker.expected_members import foresee_ranks, list_others
from resilient_jax.worker.generation_info import GenerationInfo
from resilient_jax.worker.mail_opening import MailOpener
from resilient_jax.worker.session import RehearsedState, Session
from resilient_jax.worker.standalone import StandaloneControl
from resilient_jax.worker.training_control import GenerationEnded, TrainingControl
from resilient_jax.worker.world import World

logger = logging.getLogger(__name__)

MAX_IDLE_S: Final = 30.0
"""A rehearsal that neither compiles nor ends for so long waits for the other hosts."""
REHEARSED_MICROBATCHES: Final = 2
"""Of a replica. What adds the second one to the first is a program of its own."""
CHECK_INTERVAL_S: Final = 0.5
ABORT_INTERVAL_S: Final = 0.02


class OneStepControl(StandaloneControl):
    """The control of a session of one step, such as one that is rehearsed: its generation ends with the commit.

    Events are written nowhere: they did not happen in the job, or a second time.
    """

    def __init__(self, host: HostName, agent: TrainingControl) -> None:
        super().__init__(host)
        self._agent = agent
        self._has_begun = False
        self.has_committed = False
        """Whether the step came to its commit."""
        self.asked_s = time.monotonic()
        """When the train function last asked whether it is to go on."""

    def begin_step(self, step: int) -> None:
        """Return for the first step; there is no second one."""
        self._agent.raise_if_ended()
        if self._has_begun:
            raise GenerationEnded
        self._has_begun = True

    def raise_if_ended(self) -> None:
        """Raise GenerationEnded if this worker has another order."""
        self.asked_s = time.monotonic()
        self._agent.raise_if_ended()

    def report_commit(self, commit: StepCommitted, *, holds_state: bool, part: StatePart | None) -> None:
        """End the generation."""
        self.has_committed = True
        raise GenerationEnded


def rehearse(
    train_fn: Callable[[World], None],
    order: TakeSeat,
    agent: TrainingControl,
    interrupt: Callable[[], None],
    mail: MailOpener,
    kept: list[KeptArrays],
) -> bool:
    """Run a step of `train_fn` without the other hosts; return whether it came to its commit.

    Args:
        order: order to join the other hosts; JAX counts this process as one of them already.
        agent: connection that says whether this worker has another order.
        interrupt: breaks the main thread out of a wait for other hosts.
        mail: opener of a mailbox that outlives the rehearsal.
        kept: list to which arrays are added that outlive the rehearsal.

    Raises:
        Exception: whatever `train_fn` raises, with the initial state.
        GenerationEnded: this worker has another order.
    """
    try:
        return _rehearse(train_fn, order, agent, interrupt, mail, kept, RehearsedState.PLACEHOLDERS)
    except Exception as error:
        agent.raise_if_ended()
        if isinstance(error, RehearsalFailed) or is_collective_failure(error):  # waits, whatever the state is
            raise
        logger.debug("a rehearsal with a made-up state failed", exc_info=True)
    # Out of the `except` block, whose traceback refers to the arrays of the first try.
    return _rehearse(train_fn, order, agent, interrupt, mail, kept, RehearsedState.INITIAL)


def _rehearse(
    train_fn: Callable[[World], None],
    order: TakeSeat,
    agent: TrainingControl,
    interrupt: Callable[[], None],
    mail: MailOpener,
    kept: list[KeptArrays],
    rehearsed_state: RehearsedState,
) -> bool:
    generation, others = order.generation, list_others(order)
    control, committed = OneStepControl(order.host, agent), CommittedState()
    committed.first_step, committed.kept = generation.state.step, kept
    hosts = (*(member.host for member in others), order.host)
    present = generation.shape.stage_hosts or tuple(member.host for member in generation.membership.members)
    is_kept = set(generation.shape.stage_hosts) == set(hosts)
    info = GenerationInfo(
        number=generation.number,
        hosts=hosts,
        process_index=ProcessIndex(len(others)),
        change="grow",
        reason="a rehearsal",
        layer_speeds=generation.record.slowness.speeds,
        # As the leader decides when this host is a member: a stage that is kept for it stays where it is.
        stage_hosts=generation.shape.stage_hosts if is_kept else (),
        earlier_stage_hosts=() if is_kept else (*generation.shape.earlier_stage_hosts, present),
        plan_axes=generation.shape.plan_axes,
        plan_constants=generation.shape.plan_constants,
        next_failure_s=1 / estimate_rate(generation.record.history, hosts),
        is_joining=order.host not in generation.membership.spares
        and generation.membership.find_member(order.host) is None,
    )
    session = Session(committed, control, rehearsed_state=rehearsed_state)
    reducer = Reducer(
        jax.devices,
        info.process_index,
        committed.contributions,
        session,
        max_microbatches=REHEARSED_MICROBATCHES,
    )
    reducer.held_ranks = functools.partial(
        foresee_ranks, generation, others, max(count_devices_by_host(jax.devices()))
    )
    try:
        with collective_thread.rehearse(), _watch(control, interrupt):
            train_fn(World(info, session, control, reducer, mail=mail))
    except GenerationEnded:
        agent.raise_if_ended()
    return control.has_committed


@contextlib.contextmanager
def _watch(control: OneStepControl, interrupt: Callable[[], None]) -> Iterator[None]:
    """Break the calling thread out if it has waited for too long without compiling, where it asks nobody meanwhile."""
    ended, thread = threading.Event(), threading.current_thread().ident

    def watch() -> None:
        idle_since_s = time.monotonic()
        while not ended.wait(CHECK_INTERVAL_S):
            if is_compiling(thread):
                idle_since_s = time.monotonic()
            while time.monotonic() - max(idle_since_s, control.asked_s) > MAX_IDLE_S and not ended.wait(
                ABORT_INTERVAL_S
            ):
                interrupt()

    watcher = threading.Thread(target=watch, name="resilient-jax-rehearsal", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
