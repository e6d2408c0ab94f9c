"""A snapshot of hosts that share this process: random parts, parity by the erasure code, a real server for each."""

import dataclasses
import random
from dataclasses import dataclass, field

from resilient_jax.erasure import Buffer, Checksum, ChecksumName, ReedSolomon, choose_checksum, encode
from resilient_jax.erasure.kernels import choose_kernel
from resilient_jax.errors import ChecksumMismatch, PeerError
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.protocol.snapshots import ParityGroup, SnapshotId, SnapshotPlan, SnapshotSource
from resilient_jax.snapshot.manifest import (
    LeafSlice,
    PartContents,
    PartManifest,
    checksum_blocks,
    encode_manifest,
    find_corrupt_block,
)
from resilient_jax.snapshot.messages import (
    MANIFEST,
    READ,
    SERVICE,
    ManifestReply,
    ManifestRequest,
    ReadRequest,
    Region,
)
from resilient_jax.snapshot.stripes import cut_grid, data_members, parity_members
from resilient_jax.transport import Credentials, PeerServer
from resilient_jax.transport.peer_calls import CallService, MemoryAnswer

CREDENTIALS = Credentials("test-token")
ID = SnapshotId(12, GenerationNumber(3))


@dataclass
class Keeper:
    """The memory and the server of one host.

    Attributes:
        part: the host's part, which a test may damage.
        parity: the parity chunks by row, which a test may damage.
        believes: whether the server sends damaged blocks without verification.
        lies_on_the_way: whether the server sends changed bytes, or a wrong digest.
        requests: all reads so far.
    """

    host: HostName
    part: bytearray
    manifest: PartManifest
    manifests: dict[HostName, bytes] = field(default_factory=dict)
    parity: dict[int, bytearray] = field(default_factory=dict)
    parity_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    believes: bool = False
    lies_on_the_way: bool = False
    requests: list[ReadRequest] = field(default_factory=list)
    server: PeerServer = field(init=False)

    def start(self) -> None:
        checksum = choose_checksum(self.manifest.checksum)

        def digest(data: Buffer) -> int:
            return checksum.compute(data) ^ self.lies_on_the_way

        # A test may replace `give`, so it is looked up for every request.
        service = CallService(
            {MANIFEST: self.give_manifest, READ: lambda request: self.give(request)},
            dataclasses.replace(checksum, compute=digest),
        )
        self.server = PeerServer("127.0.0.1", CREDENTIALS, {SERVICE: service}, name="rj-keeper")

    def stop(self) -> None:
        self.server.shut_down()

    def give_manifest(self, request: ManifestRequest) -> ManifestReply:
        if request.id != ID or request.host not in self.manifests:
            raise PeerError(f"{self.host} has no manifest of {request.host} in {request.id}")
        return ManifestReply(data=self.manifests[request.host])

    def give(self, request: ReadRequest) -> MemoryAnswer:
        self.requests.append(request)
        if request.id != ID:
            raise PeerError(f"{self.host} does not have {request.id}")
        checksum = choose_checksum(self.manifest.checksum)
        memory = self.part if request.region is Region.PART else self.parity[request.row]
        if request.verify and not self.believes:
            self.verify(request, checksum)
        data = bytearray(memory[request.offset : request.offset + request.length])
        data[0] ^= self.lies_on_the_way and not request.verify
        return MemoryAnswer(memoryview(data), request.verify)

    def verify(self, request: ReadRequest, checksum: Checksum) -> None:
        stop = request.offset + request.length
        if request.region is Region.PARITY:
            size = self.manifest.block_bytes
            blocks = checksum_blocks(self.parity[request.row], checksum, size)
            first, last = request.offset // size, -(-stop // size)
            if blocks[first:last] != self.parity_blocks[request.row][first:last]:
                raise ChecksumMismatch(
                    f"{self.host}: parity row {request.row} from {first} to {last} is damaged"
                )
            return
        size = self.manifest.block_bytes
        first = request.offset // size * size
        data = self.part[first : min(-(-stop // size) * size, len(self.part))]
        bad = find_corrupt_block(self.manifest, checksum, first, data)
        if bad is not None:
            raise ChecksumMismatch(f"{self.host}: block {bad} of its part is damaged")


@dataclass
class Kept:
    """A snapshot in the memory of its hosts.

    Attributes:
        parts: the original bytes of each host's part.
        keepers: memory and server of each host.
    """

    groups: tuple[ParityGroup, ...]
    parts: dict[HostName, bytes]
    keepers: dict[HostName, Keeper]
    chunks: dict[HostName, int]

    def plan(self, *lost: HostName, unaware_of: tuple[HostName, ...] = ()) -> SnapshotPlan:
        """Return the plan without the lost hosts; those in `unaware_of` have an address that refuses connections."""
        sources = [
            SnapshotSource(
                host=host, endpoint="127.0.0.1:1" if host in unaware_of else self.keepers[host].server.address
            )
            for host in self.parts
            if host not in lost or host in unaware_of
        ]
        return SnapshotPlan(id=ID, groups=self.groups, sources=tuple(sources))

    def flip(self, host: HostName, byte: int, row: int | None = None) -> None:
        """Flip a bit in a byte of a host's part, or of a parity chunk that it keeps."""
        keeper = self.keepers[host]
        (keeper.part if row is None else keeper.parity[row])[byte] ^= 0x10

    def requested(self, *hosts: HostName) -> int:
        """Return the number of bytes that were requested from these hosts so far, or from all if none is given."""
        return sum(
            request.length for host in hosts or self.keepers for request in self.keepers[host].requests
        )

    def close(self) -> None:
        for keeper in self.keepers.values():
            keeper.stop()


def keep(
    group_part_bytes: list[list[int]],
    parity: int,
    *,
    checksum: ChecksumName | None = None,
    seed: int = 0,
) -> Kept:
    """Return a snapshot of random bytes on hosts a, b, c ..., with parts of these lengths, in groups.

    Each part contains two leaves, `<host>/first` in its first half and `<host>/second` in the second.
    """
    rng = random.Random(seed)
    names = iter("abcdefghijklmnopqrstuvwxyz")
    chosen = choose_checksum(checksum)
    kept = Kept((), {}, {}, {})
    for lengths in group_part_bytes:
        group = ParityGroup(hosts=tuple(HostName(next(names)) for _ in lengths), parity=parity)
        block, _ = cut_grid(lengths, len(lengths) - parity)
        kept.groups += (group,)
        for host, length in zip(group.hosts, lengths, strict=True):
            part = rng.randbytes(length)
            kept.parts[host] = part
            kept.keepers[host] = Keeper(host, bytearray(part), _manifest(host, part, group, chosen, block))
        _make_parity(kept, group, chosen)
        for host in group.hosts:
            keeper = kept.keepers[host]
            keeper.manifests = {m: encode_manifest(kept.keepers[m].manifest) for m in group.hosts}
            keeper.start()
    return kept


def _manifest(
    host: HostName, part: bytes, group: ParityGroup, checksum: Checksum, block_bytes: int
) -> PartManifest:
    leaves = [LeafSpec(f"{m}/{name}", "uint8", (1,)) for m in group.hosts for name in ("first", "second")]
    number = 2 * group.hosts.index(host)
    half = len(part) // 2 // 64 * 64
    return PartManifest(
        id=ID,
        host=host,
        contents=PartContents(
            tuple(leaves), (LeafSlice(number, (0,), (1,), 0), LeafSlice(number + 1, (0,), (1,), half))
        ),
        part_bytes=len(part),
        checksum=checksum.name,
        block_bytes=block_bytes,
        block_checksums=checksum_blocks(part, checksum, block_bytes),
    )


def _make_parity(kept: Kept, group: ParityGroup, checksum: Checksum) -> None:
    n, m = len(group.hosts), group.parity
    block, chunk = cut_grid([len(kept.parts[host]) for host in group.hosts], n - m)
    kept.chunks |= dict.fromkeys(group.hosts, chunk)
    if not m:
        return
    code, kernel = ReedSolomon(n - m, m), choose_kernel().kernel
    for stripe in range(n):
        data = [
            kept.parts[group.hosts[member]][number * chunk : (number + 1) * chunk].ljust(chunk, b"\0")
            for number, member in enumerate(data_members(stripe, n, m))
        ]
        parity = [bytearray(chunk) for _ in range(m)]
        encode(code, kernel, data, parity)
        for row, member in enumerate(parity_members(stripe, n, m)):
            keeper = kept.keepers[group.hosts[member]]
            keeper.parity[row] = parity[row]
            keeper.parity_blocks[row] = checksum_blocks(parity[row], checksum, block)
