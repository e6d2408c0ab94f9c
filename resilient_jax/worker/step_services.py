"""What a step that is not made by `World.accumulate_microbatches` needs of the worker, such as that of a pipeline."""

import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from resilient_jax.compile.ahead_of_time import AheadOfTimeCompiler, CompilationJob
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.failpoints import ANY_INDEX, FailPoint
from resilient_jax.protocol.plan_records import PlanAxes, PlanConstants, PlanOutlook
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.protocol.worker_messages import RESTART_EXIT_CODE
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.peer_transfer import StateExchange, StateOffers, record_failed_source
from resilient_jax.step.device_throttle import DeviceThrottle
from resilient_jax.step.slow_host_watch import SlowHostWatch
from resilient_jax.transport.mail_service import MailService
from resilient_jax.worker import worker_protocol
from resilient_jax.worker.committed_state import KeptArrays
from resilient_jax.worker.mail_opening import MailOpener
from resilient_jax.worker.mail_sums import MailSums
from resilient_jax.worker.session import Session
from resilient_jax.worker.training_control import TrainingControl
from resilient_jax.worker.worker_protocol import HeldPause


@dataclasses.dataclass(frozen=True, slots=True)
class StepServices:
    """The services of one generation.

    Attributes:
        watch: watch that finds slow hosts; None: no host is found slow.
        is_joining: whether this worker takes part from the next generation on, of which this generation is the
            rehearsal.
        layer_speeds: speeds of hosts that get fewer layers of a pipeline, as parts of the speed of their peers.
        stage_hosts: hosts in their order in a pipeline's replicas, with those whose stages are kept for them.
        earlier_stage_hosts: the hosts of replicas before, from whose order the present order follows; see
            `GenerationInfo`.
        plan_axes: the planned axes that every worker takes; in a rehearsal, those of the other workers. Empty: the axes
            of the best plan.
        plan_constants: constants of the cost model by which every worker plans. Empty: the constants that the worker
            was given.
        throttle: makes devices slow that a chaos campaign has slowed down; None: no device is.
        next_failure_s: in a rehearsal the expected time to the next failure, once this worker has joined.
        mail_sums: adds up what hosts tell each other, if the world can form no clique; None: cliques can be formed.
    """

    host: HostName
    _session: Session
    _mail: MailOpener
    _control: TrainingControl
    watch: SlowHostWatch | None = None
    layer_speeds: Mapping[HostName, float] = dataclasses.field(default_factory=dict)
    stage_hosts: tuple[HostName, ...] = ()
    is_joining: bool = False
    earlier_stage_hosts: tuple[tuple[HostName, ...], ...] = ()
    plan_axes: PlanAxes = ()
    plan_constants: PlanConstants = ()
    throttle: DeviceThrottle | None = None
    next_failure_s: float = math.inf
    mail_sums: MailSums | None = None
    _compiler: AheadOfTimeCompiler | None = None

    @property
    def wait_timeout_s(self) -> float:
        """How long a step waits for a message of a peer at most: as long as a collective does."""
        return self._mail.wait_timeout_s

    def open_mail(self) -> MailService:
        """Return a new mailbox of this host. The mailbox is the caller's, and outlives the world."""
        return self._mail.open(self.host)

    @property
    def offers(self) -> StateOffers:
        """What this host offers to others at its mailboxes."""
        return self._mail.offers

    def make_exchange(self, id: SnapshotId, number: int, addresses: Mapping[HostName, str]) -> StateExchange:
        """Return how hosts read from each other what each holds of a state.

        Args:
            id: step of the state, and this generation.
            number: a number of its own for each exchange of a generation, from 1 on.
            addresses: mailboxes of the hosts.
        """
        return StateExchange(
            own=self.host,
            id=id,
            number=number,
            offers=self._mail.offers,
            credentials=self._mail.credentials,
            addresses=addresses,
            check=self._control.raise_if_ended,
            on_source_failed=functools.partial(record_failed_source, self._control.record_event),
            offer_timeout_s=self.wait_timeout_s,
        )

    def hit_failpoint(self, failpoint: FailPoint, index: int = ANY_INDEX, *, step: int | None = None) -> None:
        """Pass a place where a test may hold or kill this worker; see `Session.hit_failpoint`."""
        self._session.hit_failpoint(failpoint, index, step=step)

    def register_kept(self, arrays: KeptArrays) -> None:
        """Have arrays that the caller keeps over generations counted, and dropped when the devices go away.

        To be called in each generation: that of a rehearsal does not count.
        """
        kept = self._session.committed.kept
        if arrays not in kept:
            kept.append(arrays)

    def report_plans(self, plans: PlanOutlook) -> None:
        """Report what the loss of a host would make of planned axes. Thread-safe."""
        self._control.report_found(worker_protocol.report_plans, plans)

    @property
    def held_pause(self) -> HeldPause | None:
        """The pause that is to come when blocks are copied for the members after it; None: there is none."""
        return self._control.held_pause

    def answer_pause(self, generation: GenerationNumber) -> None:
        """Let the pause before a generation come. All members call this between the same two steps."""
        self._control.answer_pause(generation)

    def compile_ahead(self, jobs: Iterable[CompilationJob], delay_s: float = 0.0) -> None:
        """Compile these programs in the background; what has not begun when this world ends is dropped."""
        if self._compiler is not None:
            self._compiler.enqueue(jobs, delay_s)

    def end_worker(self) -> NoReturn:
        """End this process; its agent starts another, or leaves the job."""
        # At once: to unwind would wait for peers that wait for this host.
        os._exit(RESTART_EXIT_CODE)

    def begin_donation(self) -> None:
        """Return when the arrays of the committed state may be donated; what the caller keeps is that state then.

        The caller has registered what it keeps (`register_kept`), and commits what it makes of the arrays.

        Raises:
            GenerationEnded: while a snapshot of these arrays was copied; the arrays may not be donated.
        """
        self._session.wait_until_finished()
        committed = self._session.committed
        # Between the update and its commit the session must not hold arrays that are deleted.
        committed.set_parts(committed.step)

    @property
    def committed_step(self) -> int:
        """The number of committed steps."""
        return self._session.committed.step

    @property
    def must_resume_from_parts(self) -> bool:
        """Whether this generation resumes from what members have in arrays that they keep, and has not yet."""
        return self._session.committed.parts_step is not None

    @property
    def parts_step(self) -> int | None:
        """The number of committed steps of the state that members have in such arrays; None: it is elsewhere."""
        return self._session.committed.parts_step

    def resume_from_parts(self, step: int, state: Any) -> None:  # noqa: ANN401 - a pytree
        """Make `state`, after `step` steps, the committed one: this host has what it needs of it."""
        self._session.resume_from(flatten_state(step, state))
