"""The transfer of the committed state from a worker that has it to one that does not: streamed and verified.

Nothing is unpickled: a manifest has the spec and the CRC-32 of each leaf, and the bytes of the leaves follow.
"""

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes  # noqa: F401 - registers bfloat16 and the float8 types with numpy, by name
import msgspec
import numpy as np

from resilient_jax.compile.program_exchange import PROGRAM_SERVICE, ProgramDirectory
from resilient_jax.errors import ChecksumMismatch, MessageError, PeerError, PeerUnreachable
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.protocol.state_records import StateSource
from resilient_jax.state.flat_state import FlatLeaf, FlatState
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.method import Method
from resilient_jax.transport.sync_channel import SyncChannel
from resilient_jax.transport.sync_server import SyncServer

TRANSFER_CHUNK_BYTES = 2**22
"""Large enough to hide the overhead of a message; four in flight take 16 MiB."""
OFFER_TIMEOUT_S = 30.0
FETCH_TIMEOUT_S = 600.0
SERVICE = "state"
NUM_THREADS = 16
"""A host that waits for a program to be compiled occupies a thread; other hosts must still get the state meanwhile."""


class FetchStateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the state that generation `generation` continues from."""

    generation: GenerationNumber


class StateChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The manifest and the strings (first), then the bytes of the leaves: in the manifest's order, each in C order."""

    step: int = 0
    manifest: tuple[LeafSpec, ...] | None = None
    crc32s: tuple[int, ...] = ()
    strings: dict[str, str] = {}
    data: bytes = b""


FETCH_STATE = Method("fetch", FetchStateRequest, StateChunk, is_streaming=True)


class StateServer:
    """Serves this worker's state to its peers while a generation forms, and its compiled programs at any time."""

    def __init__(
        self, host_address: str, credentials: Credentials, programs: ProgramDirectory | None = None
    ) -> None:
        self._offered = threading.Condition()
        self._offer: tuple[GenerationNumber, FlatState] | None = None
        self._server = SyncServer(f"{host_address}:0", credentials=credentials, num_threads=NUM_THREADS)
        self._server.add(SERVICE, {FETCH_STATE: self._fetch})
        if programs is not None:
            self._server.add(PROGRAM_SERVICE, programs.handlers)
        self._server.start()

    @property
    def endpoint(self) -> str:
        """The address that peers fetch from."""
        return self._server.address

    def offer(self, generation: GenerationNumber, state: FlatState) -> None:
        """Serve `state`, which is in host memory, to the hosts of this generation."""
        with self._offered:
            self._offer = (generation, state)
            self._offered.notify_all()

    def withdraw(self) -> None:
        """Release the offered state, once every host has fetched it."""
        with self._offered:
            self._offer = None

    def close(self) -> None:
        """Stop the server, which ends running transfers."""
        self._server.stop()

    def _fetch(self, request: FetchStateRequest) -> Iterator[StateChunk]:
        state = self._wait_for_offer(request.generation)
        # The offered state is in host memory, so this copies only what is not in C order.
        arrays = [np.ascontiguousarray(leaf.value) for leaf in state.leaves]
        views = [array.reshape(-1).view(np.uint8) for array in arrays]
        yield StateChunk(
            step=state.step,
            strings=dict(state.strings),
            manifest=tuple(leaf.spec for leaf in state.leaves),
            crc32s=tuple(zlib.crc32(view.data) for view in views),
        )
        for view in views:
            for start in range(0, view.size, TRANSFER_CHUNK_BYTES):
                yield StateChunk(data=view[start : start + TRANSFER_CHUNK_BYTES].tobytes())

    def _wait_for_offer(self, generation: GenerationNumber) -> FlatState:
        with self._offered:
            # A newer offer ends the wait as well: the one that was asked for will not come any more.
            found = self._offered.wait_for(
                lambda: self._offer is not None and self._offer[0] >= generation, OFFER_TIMEOUT_S
            )
            if not found or self._offer is None or self._offer[0] != generation:
                raise PeerUnreachable(
                    f"state of generation {generation} was requested, expected it to be offered; this worker offers "
                    f"{'none' if self._offer is None else f'that of generation {self._offer[0]}'}"
                )
            return self._offer[1]


class CancellableTransfer:
    """The transfer in flight, which another thread can cancel, since a suspended peer sends nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: SyncChannel | None = None

    @contextlib.contextmanager
    def use_channel(self, channel: SyncChannel) -> Iterator[SyncChannel]:
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

    def _use(self, channel: SyncChannel | None) -> None:
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
        check: called between chunks, and when a source has failed; an exception that this call raises ends the
            transfer.
        on_source_failed: called for each source that failed, with the error.

    Raises:
        PeerUnreachable: no source sent the state.
    """
    for attempt in range(len(sources)):
        # Receivers begin with different sources, so that these share the load.
        source = sources[(first_source + attempt) % len(sources)]
        try:
            with transfer.use_channel(SyncChannel(source.endpoint, credentials)) as channel:
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
    source: StateSource, channel: SyncChannel, generation: GenerationNumber, check: Callable[[], None]
) -> FlatState:
    parts = channel.stream(
        SERVICE, FETCH_STATE, FetchStateRequest(generation=generation), timeout_s=FETCH_TIMEOUT_S
    )
    head = next(parts, None)
    if head is None or head.manifest is None or len(head.manifest) != len(head.crc32s):
        raise MessageError(f"{source.host} began its state without a manifest")
    leaves = []
    reader = _ByteReader(parts, check, source)
    for spec, expected in zip(head.manifest, head.crc32s, strict=True):
        array = np.empty(spec.shape, np.dtype(spec.dtype))
        view = array.reshape(-1).view(np.uint8)
        reader.read_into(view)
        found = zlib.crc32(view.data)
        if found != expected:
            raise ChecksumMismatch(
                f"leaf {spec.path} from {source.host} has CRC-32 {found:08x}, expected {expected:08x}; the bytes were "
                "changed on the way or in memory"
            )
        leaves.append(FlatLeaf(path=spec.path, value=array, kind=spec.kind, key_impl=spec.key_impl))
    return FlatState(step=head.step, leaves=tuple(leaves), strings=head.strings)


class _ByteReader:
    """Reads the data of a stream of chunks as one sequence of bytes."""

    def __init__(self, parts: Iterator[StateChunk], check: Callable[[], None], source: StateSource) -> None:
        self._parts = parts
        self._check = check
        self._source = source
        self._left = memoryview(b"")

    def read_into(self, target: np.ndarray) -> None:
        filled = 0
        while filled < target.size:
            if not self._left:
                self._check()
                part = next(self._parts, None)
                if part is None:
                    raise MessageError(f"{self._source.host} ended its state before all leaves were sent")
                self._left = memoryview(part.data)
            take = min(len(self._left), target.size - filled)
            target[filled : filled + take] = np.frombuffer(self._left[:take], np.uint8)
            filled += take
            self._left = self._left[take:]
