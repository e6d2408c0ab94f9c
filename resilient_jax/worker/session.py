"""The training session of one generation: its steps, and the committed state at their boundaries.

A session is in at most one step at a time. `commit` makes a state the one that survives failures, and `restore_or_init`
returns it in the next generation, from this process's memory, from a snapshot, or newly made.
"""

import contextlib
import enum
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from resilient_jax.errors import CallerError, StateError
from resilient_jax.events import EventKind
from resilient_jax.host_exchange import CollectiveExchange
from resilient_jax.ids import HostName
from resilient_jax.protocol.failpoints import ANY_INDEX, Corruption, FailPoint
from resilient_jax.protocol.snapshots import SnapshotPlan
from resilient_jax.protocol.state_records import StateLoss
from resilient_jax.protocol.worker_messages import RESTART_EXIT_CODE, StepCommitted
from resilient_jax.protocol.worker_report import TrainingProgress
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.state.flat_state import FlatState, ShardingRule, flatten_state, make_abstract_state
from resilient_jax.state.interfaces import FailPointHook
from resilient_jax.state.restore import restore_snapshot
from resilient_jax.state.snapshotter import Snapshotter, SnapshotWorld
from resilient_jax.state.state_digest import digest_state, make_no_state_digest
from resilient_jax.state.state_placement import (
    place_initial_state,
    place_placeholder_state,
    restore_state,
)
from resilient_jax.state.tree_match import match_tree
from resilient_jax.step.accumulation_call import AccumulationCall
from resilient_jax.step.data_sample import DataSample
from resilient_jax.telemetry.worker_activity import worker_activity
from resilient_jax.worker.committed_state import CommittedState
from resilient_jax.worker.host_comparison import HostComparison
from resilient_jax.worker.loop_tries import LoopTries
from resilient_jax.worker.observers import Observer, Sums
from resilient_jax.worker.shard_restore import ShardRestore
from resilient_jax.worker.step_results import COMMITTED, RepeatedResults
from resilient_jax.worker.training_control import GenerationEnded, TrainingControl

Tree = TypeVar("Tree")
MANY_UNCOMMITTED = 10
"""Steps in a row without a commit: the loop has none."""
MAX_NAMED_LEAVES = 3
"""In the event of a sum that is made again."""


class RehearsedState(enum.Enum):
    """The state of a rehearsal: the step is not one of the job's."""

    INITIAL = enum.auto()
    """What the user's `init` makes."""
    PLACEHOLDERS = enum.auto()
    """Made up, in the right shapes."""


class Session:
    """Steps, commits, restores and snapshots of one generation; the `StepHooks` of its reductions.

    Args:
        committed: what outlives the generation.
        state_loss: what was lost, where the job must resume from a checkpoint.
        snapshotter: snapshotter to the hosts' memory; None without an agent.
        observers: observers, called at each moment in this order.
        rehearsed_state: state of a rehearsal; None: the session is the job's.
        shard_restore: brings a state in shards from where members have it; None without an agent.

    Attributes:
        repeated: results of a step that others have committed, and this host runs again; None: it is another step.
    """

    def __init__(
        self,
        committed: CommittedState,
        control: TrainingControl,
        *,
        state_loss: StateLoss | None = None,
        snapshotter: Snapshotter | None = None,
        observers: Sequence[Observer] = (),
        comparison: HostComparison | None = None,
        rehearsed_state: RehearsedState | None = None,
        shard_restore: ShardRestore | None = None,
    ) -> None:
        self.committed = committed
        self._control = control
        self._state_loss = state_loss
        self._snapshotter = snapshotter
        self._observers = tuple(observers)
        self._comparison = comparison
        self._shard_restore = shard_restore
        self.repeated: RepeatedResults | None = None
        self.is_rehearsal = rehearsed_state is not None
        self._has_placeholders = rehearsed_state is RehearsedState.PLACEHOLDERS
        self._restored: FlatState | None = None
        """What the user's function began this generation with; until its first commit, which may have donated it."""
        self._wanted: Any = None
        """The tree of abstract arrays that the user's function asked for; until the first commit is like it."""
        self._step: int | None = None
        self._num_commits = 0
        """Of the loop that the user's function runs."""
        self._is_resumed = False
        self._tries = LoopTries(control)
        self._reduced: set[str] = set()
        """Names of the accumulations of this step that are done."""

    @property
    def is_fresh(self) -> bool:
        """Whether nothing is committed yet."""
        return self.committed.is_empty and not self.is_rehearsal

    # Steps.

    def steps(self, world: SnapshotWorld, num_steps: int, num_commits: int) -> Iterator[int]:
        """See `World.steps`."""
        self._num_commits = num_commits
        if self.committed.is_empty and not self._is_resumed:
            _refuse_restart_from_0(self._state_loss)
        uncommitted = 0
        self._tries.begin(self.committed.step)
        for step in range(self.committed.step, num_steps):
            self._control.begin_step(step)
            self._step = step
            self._reduced.clear()
            if self.repeated is None:
                self.committed.results.begin_step(step)
            else:
                self.repeated.is_step_begun = True
            for observer in self._observers:
                observer.on_step_begin(step)
            try:
                yield step
            except GeneratorExit:
                if self.committed.step <= step:
                    self._tries.note_left(self.committed.step)
                raise
            # Also after the last step: in a generation that has ended `train` must not return as if it were done.
            self._control.raise_if_ended()
            uncommitted = 0 if self.committed.step > step else uncommitted + 1
            is_too_late = uncommitted == MANY_UNCOMMITTED or (uncommitted > 0 and step + 1 == num_steps)
            if is_too_late and not self.is_rehearsal:
                _refuse_uncommitted(uncommitted, step)
            # Not in `commit`: what an interrupted snapshot raises must not skip the user's code after it on all hosts.
            committed = self.committed.state
            if (
                self._snapshotter is not None
                and committed is not None
                and committed.step == step + 1 < num_steps
            ):
                with worker_activity.task(WorkerTask.SNAPSHOT):
                    self._snapshotter.protect(world, committed)
        if self.is_rehearsal:  # what follows the loop, such as saving, is for a state that was trained
            raise GenerationEnded

    def resume_at(self, step: int) -> None:
        """See `World.resume_at`."""
        try:
            first_step = operator.index(step)
        except TypeError as error:
            raise StateError(f"resume_at: found {step!r}, expected a whole number of steps") from error
        self._is_resumed = True
        if self.committed.is_empty:
            self.committed.first_step = first_step

    def commit(self, state: Any, metrics: dict[str, float]) -> None:  # noqa: ANN401 - any pytree
        """See `World.commit`."""
        if self._step is None:
            raise StateError(
                "commit was called outside of `for step in world.steps(...)`; commit inside of it"
            )
        self.hit_failpoint(FailPoint.BEFORE_COMMIT)
        # Computed first: an update that fails, or whose collective breaks, must not become the committed state.
        with worker_activity.task(WorkerTask.COMMIT):
            jax.block_until_ready(state)
        if self.repeated is not None:
            self.repeated.require_all_taken()
        committed = flatten_state(self._step + 1, state)
        if self._wanted is not None:
            _check_can_be_restored(self._wanted, committed)
            self._wanted = None
        self.committed.set_state(committed)
        self._restored = None
        self.committed.contributions.clear()
        if self.repeated is None:
            self.committed.keep_result(COMMITTED, ())
        # Reported only now: the leader counts on a step as soon as it is reported,
        # and this host must be able to resume from it.
        self._control.report_commit(
            StepCommitted(
                progress=TrainingProgress(step=self._step + 1, num_steps=self._num_commits, metrics=metrics)
            ),
            holds_state=self.committed.holds_state,
            part=self.committed.part,
        )
        for observer in self._observers:
            observer.on_commit(committed)
        self.hit_failpoint(FailPoint.AFTER_COMMIT)

    # Accumulations.

    def begin_accumulation(self, name: str) -> int:
        """Return the step that an accumulation of this name belongs to.

        Raises:
            CallerError: the call is outside of `steps`, or the name has been accumulated in this step.
        """
        if self._step is None or name in self._reduced:
            found = "a call outside of `for step in world.steps(...)`"
            if self._step is not None:
                found = f"a second accumulation named {name!r} in step {self._step}"
            raise CallerError(
                f"accumulate_microbatches: found {found}, expected one of each name in a step. Put everything to be "
                "accumulated into one tree, or give the other accumulation another name"
            )
        return self._step

    def finish_accumulation(self, call: AccumulationCall, owners: tuple[HostName, ...], total: Sums) -> None:
        """Mark an accumulation as reduced to `total`; `owners` gives the host that computed each microbatch."""
        self._reduced.add(call.spec.name)
        for observer in self._observers:
            observer.on_reduce(call, owners, total)

    def digest_state(self) -> np.ndarray:
        """Return the digests of the state that this step begins with, as `state_digest` does."""
        state = self._restored or self.committed.state
        return digest_state(state) if state is not None else make_no_state_digest()

    def compare_hosts(self, states: np.ndarray, sample: DataSample, reads: np.ndarray) -> None:
        """See `HostComparison`."""
        if self._comparison is not None:
            self._comparison.compare_states(states, self.committed.step)
            self._comparison.compare_data(sample, reads)

    def report_misfits(self, name: str, leaves: Sequence[str]) -> None:
        """Record that limits of leaves were too low or too high for a sum, which is made again."""
        assert self._step is not None
        more = len(leaves) - MAX_NAMED_LEAVES
        named = ", ".join(leaves[:MAX_NAMED_LEAVES]) + (f" and {more} more" if more > 0 else "")
        self._control.record_event(EventKind.SUM_REPEATED, step=self._step, name=name, leaves=named)

    def leave_job(self, why: str) -> NoReturn:
        """End this process, and with it this host's part in the job."""
        self._control.record_event(EventKind.SCRIPT_REFUSED, why=why)
        # At once: to unwind would wait for peers that wait for this host.
        os._exit(RESTART_EXIT_CODE)

    def raise_if_ended(self) -> None:
        """Raise GenerationEnded if the generation has ended."""
        self._control.raise_if_ended()

    def hit_failpoint(
        self, failpoint: FailPoint, index: int = ANY_INDEX, *, step: int | None = None
    ) -> Corruption:
        """Call the observers at a failpoint of this step; return what becomes of the values computed there.

        Args:
            index: index of the microbatch at the failpoint, where there is one.
            step: step of the state that is being restored; None: the step under way, if any.
        """
        step = self._step if step is None else step
        if step is None:
            return Corruption.NONE
        found = [observer.on_failpoint(failpoint, step, index) for observer in self._observers]
        return max(found, default=Corruption.NONE)

    # The committed state.

    def restore_or_init(
        self,
        init_fn: Callable[[], Tree],
        sharding: ShardingRule | None,
        exchange: CollectiveExchange,
    ) -> Tree:
        """See `World.restore_or_init`.

        Args:
            exchange: how hosts tell each other what they lack of a state in shards.
        """
        with worker_activity.task(WorkerTask.RESTORE):
            state = self._restore_or_init(init_fn, sharding, exchange)
        if self._comparison is not None:
            self._restored = flatten_state(self.committed.step, state)
        return state

    def _restore_or_init(
        self,
        init_fn: Callable[[], Tree],
        sharding: ShardingRule | None,
        exchange: CollectiveExchange,
    ) -> Tree:
        self._control.raise_if_ended()
        # Even where the shapes are not needed: an error of the user's in `init_fn` must not wait for a failure.
        abstract = self._wanted = make_abstract_state(init_fn)
        if self.committed.snapshot_plan is not None:
            return self._restore_snapshot(self.committed.snapshot_plan, abstract, sharding)
        if self.committed.parts_step is not None and self._shard_restore is not None:
            restored = self._shard_restore.restore(
                abstract, self.committed, sharding, exchange, _make_hook(self)
            )
            self.resume_from(flatten_state(self.committed.step, restored))
            return restored
        if self._has_placeholders:
            return place_placeholder_state(abstract, sharding)
        if self.committed.state is None:
            return place_initial_state(init_fn(), sharding)
        for observer in self._observers:
            observer.on_restore(self.committed.state)
        return restore_state(abstract, self.committed.state, sharding)

    def _restore_snapshot(self, plan: SnapshotPlan, abstract: Tree, sharding: ShardingRule | None) -> Tree:
        assert self._snapshotter is not None, "a snapshot is ordered by an agent only"
        started_s = time.monotonic()
        with contextlib.closing(self._snapshotter.open_reader(plan)) as reader:
            _, state = restore_snapshot(abstract, reader, sharding, failpoint=_make_hook(self))
            self._control.record_event(
                EventKind.SNAPSHOT_RESTORED,
                step=plan.id.step,
                seconds=time.monotonic() - started_s,
                local=reader.bytes_local,
                peer=reader.bytes_peer,
                decoded=reader.bytes_decoded,
            )
        # Only now: if the read fails or is interrupted the plan stays, for the next generation to read it again.
        self.resume_from(flatten_state(plan.id.step, state))
        return state

    def resume_from(self, state: FlatState) -> None:
        """Make a state, of which this host has what it needs, the committed one."""
        self.committed.set_state(state)
        for observer in self._observers:
            observer.on_restore(state)

    def snapshot(self, world: SnapshotWorld, state: Any) -> None:  # noqa: ANN401 - any pytree
        """See `World.snapshot`."""
        if self._step is None or self.committed.step != self._step + 1:
            raise StateError(
                "snapshot was called where no step had been committed just before; call it after world.commit(state)"
            )
        if self._snapshotter is not None:
            with worker_activity.task(WorkerTask.SNAPSHOT):
                self._snapshotter.take(world, flatten_state(self.committed.step, state))

    def wait_until_finished(self) -> None:
        """See `World.wait_until_finished`."""
        if self._snapshotter is not None:
            self._snapshotter.wait_until_copied()


def _make_hook(session: Session) -> FailPointHook:
    def hit(place: FailPoint, step: int) -> None:
        session.hit_failpoint(place, step=step)

    return hit


def _check_can_be_restored(wanted: Any, state: FlatState) -> None:  # noqa: ANN401 - a tree of abstract arrays
    """Compare a generation's first commit with what the next generation will ask for.

    Raises:
        StateError: the state could not be restored; the message names the first leaves that differ.
    """
    match_tree(
        wanted,
        [leaf.spec for leaf in state.leaves],
        state.strings,
        None,
        source="commit",
        expected="the tree that the init function makes, with the same shapes and dtypes: after a failure the state is "
        "restored into it. Cast what the update has changed, or make it so in init",
    )


def _refuse_uncommitted(count: int, step: int) -> NoReturn:
    raise StateError(
        f"steps: found {count} step{'s' if count > 1 else ''} up to step {step} without a commit, expected "
        "world.commit(state) in each step: what is not committed is lost with the first failure, and is in no result. "
        "Where a step changes nothing, commit the state as it is"
    )


def _refuse_restart_from_0(loss: StateLoss | None) -> None:
    if loss is not None and loss.checkpoint_step is not None:
        raise StateError(
            "steps: found a loop that begins at step 0, expected one that resumes from a checkpoint: the job's state "
            f"was lost after {loss.step} steps, and the checkpoint of step {loss.checkpoint_step} was seen on storage. "
            "Load it where world.is_fresh, and call world.resume_at(step)"
        )
