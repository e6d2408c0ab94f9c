"""Brings the committed state from one generation into the next: kept, copied to host memory, or fetched from a host."""

import time
from collections.abc import Sequence

from resilient_jax.errors import StateError
from resilient_jax.events import EventKind
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.generation_scoped import GenerationScoped
from resilient_jax.protocol.snapshots import SnapshotPlan
from resilient_jax.protocol.state_records import StateSource
from resilient_jax.state.flat_state import FlatState, copy_to_host
from resilient_jax.state.peer_transfer import StateOffer
from resilient_jax.state.restore import read_whole_state
from resilient_jax.worker.committed_state import CommittedState
from resilient_jax.worker.shard_restore import ShardRestore, StatePeers
from resilient_jax.worker.step_results import RESULTS_NUMBER


class StateHandover(GenerationScoped):
    """Both sides of a transfer between workers, and what needs none."""

    def __init__(self, committed: CommittedState, peers: StatePeers) -> None:
        self._committed, self._peers = committed, peers

    def keep_devices(self, generation: Generation) -> None:
        """Return with the state of `generation.state.step` here, or knowing where the train function gets it from."""
        self._prepare(generation, in_place=True)

    def leave_devices(self, generation: Generation | None) -> None:
        """Do as `keep_devices` does, with everything in host memory; of no generation, keep the state alone."""
        if generation is None:
            self._keep_state()
        else:
            self._prepare(generation, in_place=False)

    def _prepare(self, generation: Generation, *, in_place: bool) -> None:
        committed = self._committed
        if generation.state.is_in_parts:
            self._prepare_part(generation, in_place=in_place)
            return
        if generation.state.snapshot is not None:
            if not in_place:
                self._leave_devices_for_snapshot(generation, generation.state.snapshot)
            committed.set_snapshot_plan(generation.state.snapshot)
            return
        if self._peers.host in generation.state.receivers:
            committed.clear()  # before the fetch: an older state is of no use, and takes memory
            committed.state = self._fetch(generation)
            return
        if not generation.state.sources:
            committed.clear()  # the job begins, or begins again: no host's state is valid
            return
        state = committed.state
        assert state is not None, "a host that receives no state has it"
        if generation.state.receivers or not in_place:
            # Receivers read from a copy: the first step may donate the
            # arrays themselves, and a re-form takes them away.
            copy = self._copy_to_host(state)
            if generation.state.receivers:
                self._peers.offers.offer(StateOffer.of_state(self._peers.host, generation.number, copy))
            if not in_place:
                committed.state = copy
                committed.move_contributions_to_host()
                committed.drop_kept()

    def _leave_devices_for_snapshot(self, generation: Generation, plan: SnapshotPlan) -> None:
        """Keep what was done of the step after a snapshot, in host memory; not after a failure that nothing explains.

        What hosts have done may be wrong then, or not fit together.
        """
        committed = self._committed
        is_of_this_step = not committed.is_empty and committed.step == plan.id.step
        is_doubtful = generation.failures.are_parts_doubtful or generation.state.trusted_step is not None
        committed.move_contributions_to_host()
        if is_of_this_step and not is_doubtful:
            committed.have_kept_leave(generation)
        else:
            committed.drop_kept()

    def _prepare_part(self, generation: Generation, *, in_place: bool) -> None:
        """Have this host's part of the state, if it has one, where the train function finds it."""
        committed = self._committed
        if self._peers.host in generation.state.receivers:
            committed.clear(keeps_copies=in_place)
            committed.set_parts(generation.state.step)
            return
        committed.set_parts(generation.state.step)
        if not in_place:
            committed.move_contributions_to_host()
            committed.have_kept_leave(generation)
            if committed.shards is not None:
                committed.shards = committed.shards.move_to_host(self._peers.host, generation.number)

    def _keep_state(self) -> None:
        """Move the state to host memory: this worker leaves its world while others train.

        Of the step in flight they have what they need, and of a state that is sharded over hosts it has a part only.
        """
        committed = self._committed
        if committed.state is not None and committed.holds_state:
            committed.state = self._copy_to_host(committed.state)
            committed.contributions.clear()
        elif not committed.is_empty:
            committed.clear()  # the others go on from their shards, or from a snapshot
        committed.drop_kept()

    def _copy_to_host(self, state: FlatState) -> FlatState:
        started_s = time.monotonic()
        copy = copy_to_host(state)
        self._peers.record_event(
            EventKind.STATE_COPIED, bytes=copy.nbytes, seconds=time.monotonic() - started_s
        )
        return copy

    def make_shard_restore(self, generation: Generation) -> ShardRestore:
        """Return how a state in shards comes to its place in a generation."""
        return ShardRestore(generation, self._peers)

    def read_results(self, generation: Generation) -> FlatState:
        """Return what members that have committed the step before `generation.state.step` have found in it.

        Raises:
            PeerUnreachable: none of them has it.
        """
        # Hosts that were left over have nothing of what is on the replicas.
        ahead = [
            holder
            for holder in generation.state.part_holders
            if holder.step == generation.state.step and holder.part.runs
        ]
        return self._read(generation, ahead, RESULTS_NUMBER)

    def _read(self, generation: Generation, sources: Sequence[StateSource], number: int = 0) -> FlatState:
        in_turn = self._peers.order(generation, sources)
        with self._peers.open_reader(generation, in_turn, number=number) as reader:
            return read_whole_state(reader)

    def _fetch(self, generation: Generation) -> FlatState:
        started_s = time.monotonic()
        state = self._read(generation, generation.state.sources)
        if state.step != generation.state.step:
            raise StateError(
                f"state of step {state.step} arrived where generation {generation.number} resumes from step "
                f"{generation.state.step}"
            )
        self._peers.record_event(
            EventKind.STATE_FETCHED, bytes=state.nbytes, seconds=time.monotonic() - started_s
        )
        return state
