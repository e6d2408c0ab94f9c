"""The state from a worker that holds it to one that does not: streamed, checked, from any of several.

Nothing is unpickled: a manifest names each leaf with shape, dtype and CRC-32, then come the bytes.
"""

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes  # noqa: F401 - teaches numpy bfloat16 and the float8 types by name
import msgspec
import numpy as np

from resilient_jax.compile import program_exchange
from resilient_jax.compile.program_exchange import ProgramDirectory
from resilient_jax.errors import ChecksumMismatch, MessageError, PeerError, PeerUnreachable
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.records import StateSource
from resilient_jax.state.flat_state import FlatLeaf, FlatState
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.method import Method
from resilient_jax.transport.sync_channel import SyncChannel
from resilient_jax.transport.sync_server import SyncServer

TRANSFER_CHUNK_BYTES = 2**22
"""Large enough that the cost of a message vanishes, small enough that four in flight are nothing."""
OFFER_TIMEOUT_S = 30.0
FETCH_TIMEOUT_S = 600.0
SERVICE = "state"
NUM_THREADS = 16
"""Hosts that wait for a program to be compiled have one each, and must not keep the state from others."""


class FetchStateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the state that generation `generation` goes on from."""

    generation: GenerationNumber


class TransferredLeaf(msgspec.Struct, frozen=True, kw_only=True):
    """What a leaf's bytes are; they follow in C order."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    crc32: int
    key_impl: str | None = None


class StateChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The manifest (first) and what is no array, then bytes of the leaves, in its order."""

    step: int = 0
    manifest: tuple[TransferredLeaf, ...] | None = None
    strings: dict[str, str] = {}
    data: bytes = b""


FETCH_STATE = Method("fetch", FetchStateRequest, StateChunk, is_streaming=True)


class StateServer:
    """Serves this worker's state to peers while a generation forms, and its compiled programs at any time."""

    def __init__(
        self, host_address: str, credentials: Credentials, programs: ProgramDirectory | None = None
    ) -> None:
        self._offered = threading.Condition()
        self._offer: tuple[GenerationNumber, FlatState] | None = None
        self._server = SyncServer(f"{host_address}:0", credentials=credentials, num_threads=NUM_THREADS)
        self._server.add(SERVICE, {FETCH_STATE: self._fetch})
        if programs is not None:
            self._server.add(
                program_exchange.PROGRAM_SERVICE, {program_exchange.FETCH_PROGRAM: programs.serve}
            )
        self._server.start()

    @property
    def endpoint(self) -> str:
        return self._server.address

    def offer(self, generation: GenerationNumber, state: FlatState) -> None:
        """Serves `state` (in host memory) to whoever asks for this generation."""
        with self._offered:
            self._offer = (generation, state)
            self._offered.notify_all()

    def withdraw(self) -> None:
        """Everybody has it: lets the copy go."""
        with self._offered:
            self._offer = None

    def close(self) -> None:
        """Serves nobody any more."""
        self._server.stop()

    def _fetch(self, request: FetchStateRequest) -> Iterator[StateChunk]:
        state = self._wait_for_offer(request.generation)
        arrays = [np.ascontiguousarray(leaf.value) for leaf in state.leaves]
        views = [array.reshape(-1).view(np.uint8) for array in arrays]
        yield StateChunk(
            step=state.step,
            strings=dict(state.strings),
            manifest=tuple(
                TransferredLeaf(
                    path=leaf.path,
                    dtype=array.dtype.name,
                    shape=leaf.value.shape,  # of the leaf: ascontiguousarray gives a scalar one dim
                    crc32=zlib.crc32(view.data),
                    key_impl=leaf.key_impl,
                )
                for leaf, array, view in zip(state.leaves, arrays, views, strict=True)
            ),
        )
        for view in views:
            for start in range(0, view.size, TRANSFER_CHUNK_BYTES):
                yield StateChunk(data=view[start : start + TRANSFER_CHUNK_BYTES].tobytes())

    def _wait_for_offer(self, generation: GenerationNumber) -> FlatState:
        with self._offered:
            found = self._offered.wait_for(
                lambda: self._offer is not None and self._offer[0] >= generation, OFFER_TIMEOUT_S
            )
            if not found or self._offer is None or self._offer[0] != generation:
                raise PeerUnreachable(
                    f"state of generation {generation} asked for, but this worker offers "
                    f"{'none' if self._offer is None else f'that of generation {self._offer[0]}'}"
                )
            return self._offer[1]


class CancellableTransfer:
    """What this process fetches now, so that another thread can end it: a peer that has stopped sends nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: SyncChannel | None = None

    @contextlib.contextmanager
    def use_channel(self, channel: SyncChannel) -> Iterator[SyncChannel]:
        """While this lasts it is this channel."""
        with channel:
            self._use(channel)
            try:
                yield channel
            finally:
                self._use(None)

    def cancel(self) -> None:
        """Has whoever waits for a peer raise PeerError."""
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
    """The state, from the first source that gives it whole; begins with `sources[first % len]`.

    Args:
        transfer: to be ended by another thread.
        check: called between chunks, and when a source has failed; raises what should end the transfer.
        on_source_failed: called for each source that failed, with why.

    Raises:
        PeerUnreachable: no source gave it.
    """
    for turn in range(len(sources)):
        source = sources[(first_source + turn) % len(sources)]
        try:
            with transfer.use_channel(SyncChannel(source.endpoint, credentials)) as channel:
                return _fetch_from(source, channel, generation, check)
        except PeerError as error:
            check()
            on_source_failed(source, error)
    names = ", ".join(source.host for source in sources)
    raise PeerUnreachable(
        f"none of the hosts that hold the state of generation {generation} gave it: {names}"
    )


def _fetch_from(
    source: StateSource, channel: SyncChannel, generation: GenerationNumber, check: Callable[[], None]
) -> FlatState:
    parts = channel.stream(
        SERVICE, FETCH_STATE, FetchStateRequest(generation=generation), timeout_s=FETCH_TIMEOUT_S
    )
    head = next(parts, None)
    if head is None or head.manifest is None:
        raise MessageError(f"{source.host} began its state without a manifest")
    leaves = []
    reader = _Bytes(parts, check, source)
    for header in head.manifest:
        array = np.empty(header.shape, np.dtype(header.dtype))
        view = array.reshape(-1).view(np.uint8)
        reader.read_into(view)
        found = zlib.crc32(view.data)
        if found != header.crc32:
            raise ChecksumMismatch(
                f"leaf {header.path} from {source.host} has CRC-32 {found:08x}, expected "
                f"{header.crc32:08x}; the bytes were changed on the way or in memory"
            )
        leaves.append(FlatLeaf(path=header.path, value=array, key_impl=header.key_impl))
    return FlatState(step=head.step, leaves=tuple(leaves), strings=head.strings)


class _Bytes:
    """The data of a stream of parts, as one run of bytes."""

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
