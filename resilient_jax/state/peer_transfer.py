"""The transfer of the committed state from a worker that has it to one that does not: read piece by piece, verified.

Nothing is unpickled: a head has the spec of each leaf, and the bytes of the leaves are read in pieces, each with its
digest.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes  # noqa: F401 - registers bfloat16 and the float8 types with numpy, by name
import msgspec
import numpy as np

from resilient_jax.compile.program_exchange import PROGRAM_SERVICE, ProgramDirectory
from resilient_jax.errors import CallerError, PeerError, PeerUnreachable
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.protocol.state_records import StateSource
from resilient_jax.state.flat_state import FlatLeaf, FlatState
from resilient_jax.transport import Credentials, PeerChannel, PeerServer
from resilient_jax.transport.method import Method, ReadMethod
from resilient_jax.transport.peer_calls import CallService, MemoryAnswer

PIECE_BYTES = 2**22
"""Large enough to hide the overhead of a request, small enough for a check between two of them."""
OFFER_TIMEOUT_S = 30.0
OFFER_WAIT_S = 0.5
"""The longest wait of one request for an offer; between two of them the receiver checks whether it still needs it."""
ANSWER_TIMEOUT_S = 10.0
"""For one request. A source that is stopped answers none."""
SERVICE = "state"


class StateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the state that generation `generation` continues from."""

    generation: GenerationNumber


class StateHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The specs of the leaves, and the strings; no specs: the state is not offered yet."""

    step: int = 0
    leaves: tuple[LeafSpec, ...] | None = None
    strings: dict[str, str] = {}


class LeafRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for bytes of a leaf, which are those of its array in C order.

    Attributes:
        leaf: index in the head's leaves.
        offset: bytes from the start of the leaf.
    """

    generation: GenerationNumber
    leaf: int
    offset: int
    length: int


DESCRIBE_STATE = Method("describe", StateRequest, StateHead)
READ_LEAF = ReadMethod("leaf", LeafRequest)


class StateServer:
    """Serves this worker's state to its peers while a generation forms, and its compiled programs at any time."""

    def __init__(
        self, host_address: str, credentials: Credentials, programs: ProgramDirectory | None = None
    ) -> None:
        self._offered = threading.Condition()  # guards the attributes below
        self._generation: GenerationNumber | None = None
        """Of the offered state; None: no state is offered."""
        self._head, self._views = StateHead(), list[memoryview]()
        services = {SERVICE: CallService({DESCRIBE_STATE: self._describe, READ_LEAF: self._read})}
        if programs is not None:
            services[PROGRAM_SERVICE] = CallService(programs.handlers)
        self._server = PeerServer(host_address, credentials, services, name="rj-state")

    @property
    def endpoint(self) -> str:
        """The address that peers fetch from."""
        return self._server.address

    def offer(self, generation: GenerationNumber, state: FlatState) -> None:
        """Serve `state`, which is in host memory, to the hosts of this generation."""
        # This copies only what is not in C order.
        arrays = [np.ascontiguousarray(leaf.value) for leaf in state.leaves]
        specs = tuple(leaf.spec for leaf in state.leaves)
        with self._offered:
            self._generation = generation
            self._head = StateHead(step=state.step, leaves=specs, strings=dict(state.strings))
            self._views = [array.reshape(-1).view(np.uint8).data for array in arrays]
            self._offered.notify_all()

    def withdraw(self) -> None:
        """Release the offered state, once every host has fetched it."""
        with self._offered:
            self._generation, self._head, self._views = None, StateHead(), []

    def close(self) -> None:
        """Stop the server, which ends running transfers."""
        self._server.close()

    def _describe(self, request: StateRequest) -> StateHead:
        with self._offered:
            # A newer offer ends the wait as well: the one that was asked for will not come any more.
            found = self._offered.wait_for(
                lambda: self._generation is not None and self._generation >= request.generation, OFFER_WAIT_S
            )
            if not found:
                return StateHead()
            self._check_offered(request.generation)
            return self._head

    def _read(self, request: LeafRequest) -> MemoryAnswer:
        with self._offered:
            self._check_offered(request.generation)
            if not 0 <= request.leaf < len(self._views):
                raise CallerError(f"leaf {request.leaf}: expected one of {len(self._views)} leaves")
            return MemoryAnswer(self._views[request.leaf][request.offset :][: request.length])

    def _check_offered(self, generation: GenerationNumber) -> None:
        if self._generation != generation:
            raise PeerUnreachable(
                f"state of generation {generation} was requested, expected it to be offered; this worker offers "
                f"{'none' if self._generation is None else f'that of generation {self._generation}'}"
            )


class CancellableTransfer:
    """The transfer in flight, which another thread can cancel, since a suspended peer sends nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: PeerChannel | None = None

    @contextlib.contextmanager
    def use_channel(self, channel: PeerChannel) -> Iterator[PeerChannel]:
        """Make `cancel` close this channel for the duration of the context."""
        with channel:
            self._use(channel)
            try:
                yield channel
            finally:
                self._use(None)

    def cancel(self) -> None:
        """Close the channel: the thread that waits for a peer raises PeerError."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()

    def _use(self, channel: PeerChannel | None) -> None:
        with self._lock:
            self._channel = channel


def fetch_state(
    generation: GenerationNumber,
    sources: Sequence[StateSource],
    first_source: int,
    credentials: Credentials,
    transfer: CancellableTransfer,
    check: Callable[[], None],
    on_source_failed: Callable[[StateSource, PeerError], None],
) -> FlatState:
    """Return the state from the first source that sends all of it.

    Args:
        first_source: index, modulo the number of sources, of the source that is tried first.
        transfer: lets another thread cancel the fetch.
        check: called between pieces, and when a source has failed; an exception that this call raises ends the
            transfer.
        on_source_failed: called for each source that failed, with the error.

    Raises:
        PeerUnreachable: no source sent the state.
    """
    for attempt in range(len(sources)):
        # Receivers begin with different sources, so that these share the load.
        source = sources[(first_source + attempt) % len(sources)]
        try:
            with transfer.use_channel(PeerChannel(source.endpoint, credentials, SERVICE)) as channel:
                return _fetch_from(source, channel, generation, check)
        except PeerError as error:
            # A transfer that was cancelled fails like one that broke: then this raises, and the source is not blamed.
            check()
            on_source_failed(source, error)
    names = ", ".join(source.host for source in sources)
    raise PeerUnreachable(
        f"none of the hosts that hold the state of generation {generation} sent it: {names}"
    )


def _fetch_from(
    source: StateSource, channel: PeerChannel, generation: GenerationNumber, check: Callable[[], None]
) -> FlatState:
    head, specs = _wait_for_head(source, channel, generation, check)
    leaves = []
    for number, spec in enumerate(specs):
        array = np.empty(spec.shape, np.dtype(spec.dtype))
        view = array.reshape(-1).view(np.uint8).data
        for offset in range(0, len(view), PIECE_BYTES):
            check()
            piece = view[offset : offset + PIECE_BYTES]
            request = LeafRequest(generation=generation, leaf=number, offset=offset, length=len(piece))
            channel.read_into(READ_LEAF, request, piece, timeout_s=ANSWER_TIMEOUT_S)
        leaves.append(FlatLeaf(path=spec.path, value=array, kind=spec.kind, key_impl=spec.key_impl))
    return FlatState(step=head.step, leaves=tuple(leaves), strings=head.strings)


def _wait_for_head(
    source: StateSource, channel: PeerChannel, generation: GenerationNumber, check: Callable[[], None]
) -> tuple[StateHead, tuple[LeafSpec, ...]]:
    deadline_s = time.monotonic() + OFFER_TIMEOUT_S
    while time.monotonic() < deadline_s:
        check()
        request = StateRequest(generation=generation)
        head = channel.call(DESCRIBE_STATE, request, timeout_s=OFFER_WAIT_S + ANSWER_TIMEOUT_S)
        if head.leaves is not None:
            return head, head.leaves
    raise PeerUnreachable(
        f"{source.host} has not offered the state of generation {generation} within {OFFER_TIMEOUT_S:g} s"
    )
