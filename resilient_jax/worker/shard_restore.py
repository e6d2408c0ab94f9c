"""Restores a state in shards from live workers, each of which has some of it: nothing goes back to a snapshot.

Every host takes part. Hosts whose devices have what they need keep it there. If any lacks some, hosts tell each other
which units those are, their holders offer copies, and each host reads its boxes from them.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from resilient_jax.events import EventKind
from resilient_jax.host_exchange import CollectiveExchange
from resilient_jax.ids import HostName
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.state_records import PartHolder, StateSource
from resilient_jax.state.flat_state import ShardingRule, flatten_state, flatten_strings
from resilient_jax.state.held_shards import HeldShards, find_part
from resilient_jax.state.interfaces import FailPointHook
from resilient_jax.state.peer_transfer import StateOffer, StateOffers, WorkerReader, record_failed_source
from resilient_jax.state.restore import restore_snapshot
from resilient_jax.state.state_placement import is_here, restore_state
from resilient_jax.state.tree_match import list_leaf_specs, match_tree
from resilient_jax.transport.credentials import Credentials
from resilient_jax.worker.committed_state import CommittedState

Tree = TypeVar("Tree")
SourceT = TypeVar("SourceT", bound=StateSource)
HOLDERS_OF_UNIT: Final = 2
"""That a host reads one unit from: the second in case that the first fails."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatePeers:
    """How this worker reads states from its peers, and they from it.

    Attributes:
        offers: what this worker offers.
        raise_if_ended: raises when the generation that reads has ended.
    """

    host: HostName
    offers: StateOffers
    credentials: Credentials
    raise_if_ended: Callable[[], None]
    record_event: Callable[..., object]

    def order(self, generation: Generation, sources: Sequence[SourceT]) -> list[SourceT]:
        """Return sources in the order in which this host asks them: hosts ask different ones first."""
        position = [member.host for member in generation.membership.members].index(self.host)
        turn = position % max(len(sources), 1)
        return [*sources[turn:], *sources[:turn]]

    def open_reader(
        self,
        generation: Generation,
        sources: Sequence[StateSource],
        own: StateOffer | None = None,
        *,
        number: int = 0,
    ) -> WorkerReader:
        """Return a reader of what sources hold; see `WorkerReader`."""
        on_failed = functools.partial(record_failed_source, self.record_event)
        return WorkerReader(
            generation.number, sources, self.credentials, self.raise_if_ended, on_failed, own, number=number
        )


class ShardRestore:
    """The restore of one generation."""

    def __init__(self, generation: Generation, peers: StatePeers) -> None:
        self._generation, self._peers = generation, peers

    def restore(
        self,
        abstract: Tree,
        committed: CommittedState,
        sharding: ShardingRule | None,
        exchange: CollectiveExchange,
        failpoint: FailPointHook,
    ) -> Tree:
        """Return the state of the generation's step. Every host must call this.

        Args:
            abstract: abstract tree as `make_abstract_state` returns it.
            committed: has what this host has of the state. Where some is read, its arrays leave the devices first.
            sharding: sharding of each array in the present world.
            exchange: how hosts tell each other what they lack.

        Raises:
            StateError: as `restore_state`.
            PeerUnreachable: a holder is lost, or late.
        """
        started_s, held = time.monotonic(), committed.shards
        present = held.state if held is not None else None
        has_all = present is not None and is_here(abstract, present, sharding)
        lacking = () if has_all else self._list_units(abstract, sharding)
        lacked = {unit for units in exchange.gather(lacking) for unit in units}
        own = None
        if held is not None and (not has_all or not lacked.isdisjoint(_list_units(held))):
            own = held.copy(self._peers.host, self._generation.number)
            self._peers.offers.offer(own)
        if has_all:
            assert present is not None
            state = restore_state(abstract, present, sharding)
            if lacked:
                exchange.gather(())
            return state
        if held is not None:
            committed.shards = dataclasses.replace(held, state=None, offer=own)
        del held, present
        with contextlib.closing(self._open_reader(lacking, own)) as reader:
            step, state = restore_snapshot(abstract, reader, sharding, failpoint=failpoint)
        # Until all have read theirs each keeps what it had: should one be lost now, these shards are what is left.
        exchange.gather(())
        placed = flatten_state(step, state)
        self._peers.record_event(
            EventKind.STATE_FETCHED,
            bytes=HeldShards(self._holders[0].part, placed).nbytes,
            seconds=time.monotonic() - started_s,
        )
        return state

    @property
    def _holders(self) -> tuple[PartHolder, ...]:
        return self._generation.state.part_holders

    def _list_units(self, abstract: object, sharding: ShardingRule | None) -> tuple[int, ...]:
        """Return the units that this host lacks: that of its rank, or all where shards are cut in another way."""
        specs = list_leaf_specs(abstract)
        matched = match_tree(
            abstract, specs, flatten_strings(abstract), sharding, source="init", expected="the same"
        )
        part = find_part(leaf.sharding for leaf in matched.leaves if leaf.sharding is not None)
        before = self._holders[0].part
        if part is None or part.cut != before.cut:
            return tuple(range(before.num_units))
        if not part.runs:
            return (0,)  # a host that is left over learns from its holders what is no array
        return tuple(unit for first, end in part.runs for unit in range(first, end))

    def _open_reader(self, units: Sequence[int], own: StateOffer | None) -> WorkerReader:
        sources: dict[HostName, StateSource] = {}
        for unit in units:
            holders = [
                holder
                for holder in self._holders
                if holder.host != self._peers.host
                and any(first <= unit < end for first, end in holder.part.runs)
            ]
            for holder in self._peers.order(self._generation, holders)[:HOLDERS_OF_UNIT]:
                sources[holder.host] = StateSource(host=holder.host, endpoint=holder.endpoint)
        return self._peers.open_reader(self._generation, tuple(sources.values()), own)


def _list_units(held: HeldShards) -> set[int]:
    return {unit for first, end in held.part.runs for unit in range(first, end)}
