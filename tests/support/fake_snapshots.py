"""Fakes of the snapshot server and the reader, states on random meshes, and the comparison of two states."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.erasure import choose_checksum
from resilient_jax.errors import SnapshotDropped
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.manifest import PartManifest, checksum_blocks
from resilient_jax.snapshot.stripes import MAX_BLOCK_BYTES
from resilient_jax.state.capture import SnapshotCapture
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.state_partition import partition_state
from tests.support.patience import patience

CHECKSUM = choose_checksum()
TIMEOUT_S = patience(6)
AXES = ("x", "y", "z")
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "int32", "complex64", "uint8")
MESHES = ((8,), (4, 2), (2, 4), (2, 2, 2), (1, 8), (8, 1), (4,), (2, 2), (2,), (1,))


class FakeSnapshot:
    """A fake of all snapshot servers and of the reader: every host's part and manifest in this process."""

    def __init__(self, part_bytes, *, refuse=None):
        self.parts = {host: bytearray(b"\xa5" * size) for host, size in part_bytes.items()}
        self.done = {}
        self.abandoned = []
        self.refuse = refuse
        self.reads = self.bytes_read = 0

    def of(self, host):
        return FakeServerClient(self, host)

    # The interface of `PartReader`.

    local_host = None
    has_copies = False

    def read_manifests(self):
        return dict(self.done)

    def read_all(self, reads):
        for host, offset, target in reads:
            assert not target.readonly
            assert target.format == "B"
            data = self.parts[host][offset : offset + len(target)]
            assert len(data) == len(target), "read past the part's end"
            target[:] = data
            self.reads += 1
            self.bytes_read += len(target)
        return []

    def overwrite(self):
        for part in self.parts.values():
            part[:] = b"\x5a" * len(part)


class FakeServerClient:
    """A fake `PartServer` of one host."""

    def __init__(self, snapshot, host):
        self.snapshot, self.host = snapshot, host
        self.writing = {}

    def begin(self, id):
        if self.snapshot.refuse is not None:
            raise SnapshotDropped(self.snapshot.refuse)
        self.writing[id] = memoryview(self.snapshot.parts[self.host])
        return self.writing[id]

    def wait_settled(self, id, timeout_s):
        return True

    def finish(self, id, contents):
        self.writing.pop(
            id
        ).release()  # a BufferError: an array still uses the memory, which cannot be unmapped
        part = self.snapshot.parts[self.host]
        self.snapshot.done[self.host] = PartManifest(
            id=id,
            host=self.host,
            contents=contents,
            part_bytes=len(part),
            checksum=CHECKSUM.name,
            block_bytes=MAX_BLOCK_BYTES,
            block_checksums=checksum_blocks(part, CHECKSUM, MAX_BLOCK_BYTES),
        )

    def abandon(self, id):
        self.writing.pop(id).release()
        self.snapshot.abandoned.append((self.host, id))


class RecordedEvents:
    """An `EventRecorder` that keeps the events."""

    def __init__(self):
        self.events = []
        self.changed = threading.Condition()

    def __call__(self, kind, **detail):
        with self.changed:
            self.events.append((kind, detail))
            self.changed.notify_all()

    def kinds(self):
        return [kind for kind, _ in self.events]

    def wait_for(self, kind, count=1):
        """Wait for `count` events of a kind; return their details."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.kinds().count(kind) >= count, TIMEOUT_S), self.events
            return [detail for found, detail in self.events if found is kind]


def host_names(count):
    return [HostName(f"host-{index}") for index in range(count)]


def hosts_of_eight(count):
    """Return `count` hosts, and the function that assigns the eight devices to them."""
    hosts = host_names(count)
    return hosts, lambda device: hosts[device.id * count // 8]


def snapshot_id(step=3, generation=1):
    return SnapshotId(step, GenerationNumber(generation))


def take(state, hosts, host_of, *, threads=1, step=3):
    """Return a complete snapshot of a state, taken by captures on all hosts, and its partition."""
    flat = flatten_state(step, state)
    leaves = flat.leaves
    partition = partition_state(leaves, host_of, hosts)
    snapshot, events = FakeSnapshot(partition.part_bytes), RecordedEvents()
    captures = [SnapshotCapture(snapshot.of(host), host, events, num_threads=threads) for host in hosts]
    for capture in captures:
        capture.start(snapshot_id(step), partition, leaves, flat.strings)
    with events.changed:  # a part is complete a moment after its arrays are read
        assert events.changed.wait_for(lambda: len(events.events) == len(hosts), TIMEOUT_S)
    assert sorted(snapshot.done) == sorted(hosts), events.events
    for capture in captures:
        assert capture.close(TIMEOUT_S)
    return snapshot, partition


def put(array, sharding):
    """Return an array of any dtype with this sharding, each shard in its own memory."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.array(array[index]))


def values(shape, dtype, seed):
    """Return random values that are as distinct as the dtype allows."""
    raw = np.random.default_rng(seed).integers(0, 2**31, shape)
    if dtype == "complex64":
        return (raw + 1j * (raw % 1000)).astype(np.complex64)
    if dtype in ("int4", "bool"):
        return (raw % 16 - 8 if dtype == "int4" else raw % 2).astype(jnp.dtype(dtype))
    if dtype.startswith("float8"):
        return (raw % 120).astype(np.uint8).view(jnp.dtype(dtype))
    return raw.astype(jnp.dtype(dtype))


@st.composite
def shardings(draw, shape):
    """Draw a sharding of an array: a random mesh of some of the devices, and a spec that divides the shape."""
    sizes = draw(st.sampled_from(MESHES))
    count = int(np.prod(sizes))
    order = draw(st.permutations(range(8)))[:count]
    devices = np.array(jax.devices(), dtype=object)[np.array(order)].reshape(sizes)
    mesh = Mesh(devices, AXES[: len(sizes)])
    free = list(mesh.axis_names)
    spec = []
    for length in shape:
        choices = [()] + [
            axes
            for some in range(1, len(free) + 1)
            for axes in itertools.permutations(free, some)
            if length % int(np.prod([mesh.shape[axis] for axis in axes])) == 0
        ]
        axes = draw(st.sampled_from(choices))
        free = [axis for axis in free if axis not in axes]
        spec.append(axes or None)
    return NamedSharding(mesh, P(*spec))


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 16, 24]), max_size=3).map(tuple)


@st.composite
def states(draw, *, max_leaves=4):
    """Draw a state with leaves of random shapes, dtypes and shardings, some of them in host memory."""
    state = {}
    for number in range(draw(st.integers(0, max_leaves))):
        shape = draw(shapes)
        array = values(shape, draw(st.sampled_from(DTYPES)), number)
        on_host = draw(st.integers(0, 5)) == 0
        state[f"leaf{number}"] = array if on_host else put(array, draw(shardings(shape)))
    return state


def plain(leaf):
    """Return dtype, shape and bytes of a leaf, for comparison."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), *plain(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    return array.dtype.name, array.shape, array.tobytes()


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert plain(a) == plain(b)


def abstract_of(state):
    return jax.eval_shape(lambda: state)
