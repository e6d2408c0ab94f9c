"""Actions and checks for a job of real snapshot servers whose workers a test plays."""

import contextlib

from resilient_jax.erasure import ReedSolomon, decode
from resilient_jax.erasure.kernels import choose_kernel
from resilient_jax.protocol.failpoints import FAILPOINTS_VARIABLE, FailPointController
from resilient_jax.protocol.snapshots import SnapshotPhase
from resilient_jax.snapshot.messages import Region
from resilient_jax.snapshot.stripes import cut_grid, data_members, parity_members
from tests.support.snapshot_servers import WAIT_S, make_layout, make_part, running, take

COMMITTED = SnapshotPhase.COMMITTED
SIZES = (300_000, 310_001, 286_720, 1, 299_999, 262_145)
"""Lengths of parts: multiples of pages and blocks and not, and a single byte."""


def open_all(hosts, parity, generation=1, sizes=SIZES, **options):
    """Open a layout by a new worker on each host; return the layout and the workers."""
    layout = make_layout(hosts, parity, sizes[: len(hosts)], generation)
    workers = [host.worker() for host in hosts]
    for worker in workers:
        worker.open_layout(layout, **options)
    return layout, workers


def part_of(layout, host, id):
    return make_part(id, host.name, layout.part_bytes[host.name])


def take_all(layout, hosts, workers, id):
    for host, worker in zip(hosts, workers, strict=True):
        take(worker, id, host.name, part_of(layout, host, id))


def commit_all(layout, hosts, workers, id):
    take_all(layout, hosts, workers, id)
    for host in hosts:
        host.wait_phase(id, COMMITTED)
    assert all(worker.wait_committed(id, WAIT_S) for worker in workers)


def chunks_of(layout, hosts, id, parity):
    """Return the length of a chunk, and the padded chunks of every member."""
    k = len(hosts) - parity
    length = cut_grid([layout.part_bytes[host.name] for host in hosts], k).chunk_bytes
    padded = [part_of(layout, host, id).ljust(k * length, b"\0") for host in hosts]
    return length, [[part[j * length :][:length] for j in range(k)] for part in padded]


def assert_rebuilds(layout, alive, hosts, id, parity, lost):
    """Check that the parts of the lost hosts can be decoded from the shards of the others."""
    n, k = len(hosts), len(hosts) - parity
    length, chunks = chunks_of(layout, hosts, id, parity)
    kernel = choose_kernel().kernel
    for stripe in range(n):
        present, wanted = {}, {}
        for shard, member in enumerate(
            (*data_members(stripe, n, parity), *parity_members(stripe, n, parity))
        ):
            if member in lost:
                if shard < k:
                    wanted[shard] = bytearray(length)
            elif shard < k:
                offset = shard * length
                inside = max(0, min(length, layout.part_bytes[hosts[member].name] - offset))
                found = alive[member].read(id, Region.PART, inside, offset=offset) if inside else b""
                present[shard] = found.ljust(length, b"\0")
            else:
                present[shard] = alive[member].read(id, Region.PARITY, length, row=shard - k)
        decode(ReedSolomon(k, parity), kernel, present, wanted)
        for shard, found in wanted.items():
            assert found == chunks[data_members(stripe, n, parity)[shard]][shard]


@contextlib.contextmanager
def held_at(tmp_path, count):
    """Run servers, and a controller that can block them at failpoints."""
    folder = tmp_path / "faults"
    controller = FailPointController(folder)
    with running(count, {FAILPOINTS_VARIABLE: str(folder)}) as hosts:
        try:
            yield hosts, controller
        finally:
            controller.release()
