"""The transfer of a state between workers: each says what it holds, in the form of a snapshot's part, and is read.

Nothing is unpickled: a part has the spec of each leaf and the boxes of leaves that the worker holds, with their
offsets. The bytes are read in pieces, each with its digest, from several workers at once.
"""

import bisect
import copy
import dataclasses
import functools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from resilient_jax.compile.program_exchange import PROGRAM_SERVICE, ProgramDirectory
from resilient_jax.errors import CallerError, PeerError, PeerUnreachable
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.protocol.state_records import StateSource
from resilient_jax.snapshot.manifest import HeldPart, LeafSlice, PartContents, align_slice
from resilient_jax.snapshot.snapshot_reader import PartRead
from resilient_jax.state.flat_state import FlatState
from resilient_jax.state.host_shards import copy_held_boxes
from resilient_jax.state.index_box import IndexBox
from resilient_jax.threads import ResultT, run_all, start_thread_pool
from resilient_jax.transport import Credentials, PeerChannel, PeerServer
from resilient_jax.transport.method import Method, ReadMethod
from resilient_jax.transport.peer_calls import CallService, MemoryAnswer

PIECE_BYTES: Final = 2**22
"""Large enough to hide the overhead of a request, small enough for a check between two of them."""
OFFER_TIMEOUT_S: Final = 30.0
OFFER_WAIT_S: Final = 0.5
"""The longest wait of one request for an offer; between two of them the receiver checks whether it still needs it."""
ANSWER_TIMEOUT_S: Final = 10.0
"""For one request. A source that is stopped answers none."""
CONCURRENT_CALLS: Final = 4
SOURCES_AT_ONCE: Final = 4
"""Workers that are asked what they hold at once; no more are asked if one of them holds everything."""
SERVICE: Final = "state"


class OfferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for what a worker holds of a state of a generation.

    Attributes:
        number: which of the generation's states; 0: the one that the generation continues from.
    """

    generation: GenerationNumber
    number: int = 0


class OfferAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the worker holds; None: it does not offer it yet."""

    part: HeldPart | None = None


class PartRequest(OfferRequest, frozen=True, kw_only=True):
    """Request for bytes of what a worker holds, inside of one slice."""

    offset: int
    length: int


DESCRIBE_PART: Final = Method("describe", OfferRequest, OfferAnswer)
READ_PART: Final = ReadMethod("part", PartRequest)


class StateOffer:
    """What a worker holds of a state, in host memory.

    Attributes:
        part: what it says of that.
    """

    def __init__(
        self,
        id: SnapshotId,
        host: HostName,
        leaves: Sequence[LeafSpec],
        held: Iterable[tuple[int, IndexBox, np.ndarray]],
        strings: Mapping[str, str],
    ) -> None:
        """Take arrays, which are not copied if they are in C order.

        Args:
            id: the step of the state, and the generation that continues from it.
            leaves: all leaves of the state, the same on every host.
            held: boxes of leaves, by the index of the leaf.
        """
        slices: list[LeafSlice] = []
        self._views: list[memoryview] = []
        end = 0
        for leaf, box, array in held:
            slices.append(LeafSlice(leaf, box.start, box.stop, end))
            self._views.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            end += align_slice(array.nbytes)
        self._starts = [piece.offset for piece in slices]
        contents = PartContents(tuple(leaves), tuple(slices), dict(strings))
        self.part = HeldPart(id, host, contents, end)

    @classmethod
    def of_state(cls, host: HostName, generation: GenerationNumber, state: FlatState) -> "StateOffer":
        """Return what this host has of a state; what is on devices is copied."""
        boxes = (
            (number, box, array)
            for number, leaf in enumerate(state.leaves)
            for box, array in copy_held_boxes(leaf).items()
        )
        id = SnapshotId(state.step, generation)
        return cls(id, host, [leaf.spec for leaf in state.leaves], boxes, state.strings)

    def for_generation(self, generation: GenerationNumber) -> "StateOffer":
        """Return the same, with the same memory, for another generation that continues from the state."""
        found = copy.copy(self)
        id = msgspec.structs.replace(self.part.id, generation=generation)
        found.part = msgspec.structs.replace(self.part, id=id)
        return found

    def view(self, offset: int, length: int) -> memoryview:
        """Return bytes of a slice.

        Raises:
            CallerError: no slice has all of them.
        """
        number = bisect.bisect_right(self._starts, offset) - 1
        start = offset - self._starts[number] if number >= 0 else -1
        if start < 0 or length < 0 or start + length > len(self._views[number]):
            raise CallerError(
                f"{length} bytes at {offset}: expected bytes of one of the {len(self._starts)} slices"
            )
        return self._views[number][start : start + length]


class StateOffers:
    """What this worker offers; a service of any number of servers.

    Attributes:
        calls: answers the calls of a `WorkerReader`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the attribute below
        self._offers: dict[tuple[GenerationNumber, int], StateOffer] = {}
        """By generation and number."""
        self.calls = CallService({DESCRIBE_PART: self._describe, READ_PART: self._read})

    def offer(self, offer: StateOffer, number: int = 0) -> None:
        """Serve what this host holds to the hosts of a generation, and nothing of earlier ones any more.

        Args:
            number: as in `OfferRequest`; each is offered once.
        """
        new = offer.part.id.generation
        with self._changed:
            self._offers = {key: known for key, known in self._offers.items() if key[0] >= new}
            self._offers[new, number] = offer
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Release all that is offered, once every host has read what it needs."""
        with self._changed:
            self._offers = {}

    def _describe(self, request: OfferRequest) -> OfferAnswer:
        asked = (request.generation, request.number)
        with self._changed:
            # An offer of a newer generation ends the wait: the one that was asked for will not come any more.
            found = self._changed.wait_for(
                lambda: asked in self._offers or any(key[0] > request.generation for key in self._offers),
                OFFER_WAIT_S,
            )
            return OfferAnswer(part=self._find(request).part if found else None)

    def _read(self, request: PartRequest) -> MemoryAnswer:
        with self._changed:
            return MemoryAnswer(self._find(request).view(request.offset, request.length))

    def _find(self, request: OfferRequest) -> StateOffer:
        offer = self._offers.get((request.generation, request.number))
        if offer is None:
            raise PeerUnreachable(
                f"state {request.number} of generation {request.generation} was requested, expected it to be offered; "
                f"this worker offers {sorted(self._offers) or 'none'}"
            )
        return offer


class StateServer:
    """Serves this worker's state to its peers while a generation forms, and its compiled programs at any time."""

    def __init__(
        self,
        host_address: str,
        credentials: Credentials,
        offers: StateOffers,
        programs: ProgramDirectory | None = None,
    ) -> None:
        services = {SERVICE: offers.calls}
        if programs is not None:
            services[PROGRAM_SERVICE] = CallService(programs.handlers)
        self._server = PeerServer(host_address, credentials, services, name="rj-state")

    @property
    def endpoint(self) -> str:
        """The address that peers fetch from."""
        return self._server.address

    def close(self) -> None:
        """Stop the server, which ends running transfers."""
        self._server.close()


class WorkerReader:
    """Reads what live workers hold of the state that a generation continues from; a `PartReader`, for one thread."""

    has_copies = True

    def __init__(
        self,
        generation: GenerationNumber,
        sources: Sequence[StateSource],
        credentials: Credentials,
        check: Callable[[], None],
        on_source_failed: Callable[[HostName, PeerError], None],
        own: StateOffer | None = None,
        *,
        number: int = 0,
        offer_timeout_s: float = OFFER_TIMEOUT_S,
    ) -> None:
        """Ask nobody yet.

        Args:
            sources: workers that hold the state or a part, those to be asked first at the front.
            check: called several times a second while the caller waits; an exception that `check` raises ends the
                reading.
            on_source_failed: called for each source that failed, with the error.
            own: what this host holds itself.
            number: as in `OfferRequest`.
            offer_timeout_s: for how long to wait until a source offers the state.
        """
        self._generation, self._number, self._offer_timeout_s = generation, number, offer_timeout_s
        self._sources, self._credentials = deque(sources), credentials
        self._names = ", ".join(source.host for source in sources)
        self._check, self._on_source_failed, self._own = check, on_source_failed, own
        self._parts = {} if own is None else {own.part.host: own.part}
        self._channels: dict[HostName, PeerChannel] = {}
        self._errors: dict[HostName, PeerError] = {}
        """Of sources that have failed."""
        self._num_told = 0
        """Failed sources that the caller knows of."""
        self._pool = start_thread_pool(CONCURRENT_CALLS, "rj-state-read")

    @property
    def local_host(self) -> HostName | None:
        """This host, if it holds something itself."""
        return None if self._own is None else self._own.part.host

    def read_manifests(self) -> dict[HostName, HeldPart]:
        """Return what the sources hold that have not failed: of all of them, or of some that hold everything.

        Raises:
            PeerUnreachable: none is left.
        """
        while self._sources and not any(map(_is_whole, self._parts.values())):
            asked = [self._sources.popleft() for _ in range(min(SOURCES_AT_ONCE, len(self._sources)))]
            for source in asked:
                self._channels[source.host] = PeerChannel(source.endpoint, self._credentials, SERVICE)
            parts = self._run([functools.partial(self._ask, source.host) for source in asked])
            self._parts |= {part.host: part for part in parts if part is not None}
        if not self._parts:
            raise PeerUnreachable(
                f"none of the hosts that hold the state of generation {self._generation} sent it: {self._names}"
            )
        return dict(self._parts)

    def read_all(self, reads: Sequence[PartRead]) -> list[int]:
        """Fill all targets, several at a time; return the indices of reads whose source has failed.

        Their targets have undefined contents.
        """
        turns: Counter[HostName] = Counter()
        jobs: list[tuple[int, Callable[[], int | None]]] = []
        for number, read in enumerate(reads):
            for start in range(0, len(read.target), PIECE_BYTES):
                piece = PartRead(read.host, read.offset + start, read.target[start : start + PIECE_BYTES])
                jobs.append((turns[read.host], functools.partial(self._read, number, piece)))
                turns[read.host] += 1
        # The sources in turn, so that each of them always has something to send.
        jobs.sort(key=lambda job: job[0])
        failed = self._run([job for _, job in jobs])
        return sorted({number for number in failed if number is not None})

    def close(self) -> None:
        """End running reads, and the threads."""
        for channel in list(self._channels.values()):
            channel.close()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> "WorkerReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, jobs: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
        def end(_: BaseException) -> None:
            for channel in list(self._channels.values()):
                channel.close()

        results = run_all(self._pool, jobs, self._check, end)
        if len(self._errors) > self._num_told:
            # A transfer that is to end fails like one that broke: then this raises, and no source is blamed.
            self._check()
        for host, error in list(self._errors.items())[self._num_told :]:
            self._num_told += 1
            self._parts.pop(host, None)
            self._on_source_failed(host, error)
        return results

    def _ask(self, host: HostName) -> HeldPart | None:
        """Wait for what a source offers; return None if it fails."""
        deadline_s = time.monotonic() + self._offer_timeout_s
        request = OfferRequest(generation=self._generation, number=self._number)
        try:
            while time.monotonic() < deadline_s:
                answer = self._channels[host].call(
                    DESCRIBE_PART, request, timeout_s=OFFER_WAIT_S + ANSWER_TIMEOUT_S
                )
                if answer.part is not None:
                    return msgspec.structs.replace(answer.part, host=host)
            raise PeerUnreachable(
                f"{host} has not offered the state of generation {self._generation} within "
                f"{self._offer_timeout_s:g} s"
            )
        except PeerError as error:
            self._errors.setdefault(host, error)
            return None

    def _read(self, number: int, piece: PartRead) -> int | None:
        """Fill the target of a piece of a read; return the read's index if its source has failed."""
        host, offset, target = piece
        if host == self.local_host:
            assert self._own is not None
            target[:] = self._own.view(offset, len(target))
            return None
        if host in self._errors:
            return number
        request = PartRequest(
            generation=self._generation, number=self._number, offset=offset, length=len(target)
        )
        try:
            self._channels[host].read_into(READ_PART, request, target, timeout_s=ANSWER_TIMEOUT_S)
        except PeerError as error:
            self._errors.setdefault(host, error)
            self._channels[host].close()  # ends the other calls that wait for it
            return number
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateExchange:
    """How the hosts of a generation read from each other, once, what each of them holds of a state.

    Attributes:
        id: step of the state, and the generation.
        number: as in `OfferRequest`.
        offers: offers of this host, which are served at its address.
        addresses: where the hosts serve their offers.
        check: as in `WorkerReader`, like what follows.
    """

    own: HostName
    id: SnapshotId
    number: int
    offers: StateOffers
    credentials: Credentials
    addresses: Mapping[HostName, str]
    check: Callable[[], None]
    on_source_failed: Callable[[HostName, PeerError], None]
    offer_timeout_s: float

    def offer(self, leaves: Sequence[LeafSpec], held: Iterable[tuple[int, IndexBox, np.ndarray]]) -> None:
        """Offer boxes of leaves, until the offers are withdrawn."""
        self.offers.offer(StateOffer(self.id, self.own, leaves, held, {}), self.number)

    def open_reader(self, hosts: Sequence[HostName]) -> WorkerReader:
        """Return a reader of what these hosts offer."""
        return WorkerReader(
            self.id.generation,
            [StateSource(host=host, endpoint=self.addresses[host]) for host in hosts],
            self.credentials,
            self.check,
            self.on_source_failed,
            number=self.number,
            offer_timeout_s=self.offer_timeout_s,
        )


def record_failed_source(record_event: Callable[..., object], source: HostName, error: PeerError) -> None:
    """Record that a worker from which a state was read has failed."""
    record_event(EventKind.STATE_SOURCE_FAILED, source=source, error=str(error))


def _is_whole(part: HeldPart) -> bool:
    """Return whether a host holds every element, as far as its boxes are disjoint."""
    num_held = sum(IndexBox(piece.start, piece.stop).size for piece in part.contents.slices)
    return num_held == sum(math.prod(leaf.shape) for leaf in part.contents.leaves)
