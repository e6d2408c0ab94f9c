"""Act as the worker of one surviving host of `snapshot_timing.py`: restore its share for each line of standard input.

    snapshot_survivor.py SHARE

SHARE is a `Share` as JSON. The script prints "ready"; then, for each line that it reads, "restored" when its share is
on its device, and "right" when every bit has been compared.
"""

import contextlib
import os
import sys

import jax
import msgspec
import numpy as np

from resilient_jax.protocol.worker_messages import SNAPSHOT_CONNECTION_VARIABLE
from resilient_jax.snapshot.local_client import LocalServerClient
from resilient_jax.snapshot.snapshot_reader import SnapshotReader
from resilient_jax.state.box_reads import BoxGatherer, ReadTarget
from resilient_jax.state.index_box import IndexBox
from resilient_jax.state.restore import SlabAllocator
from tests.benchmarks.jobs.snapshot_hosts import DTYPE, Share, random_leaf
from tests.support.snapshot_servers import CREDENTIALS


def main() -> None:
    share = msgspec.json.decode(sys.argv[1], type=Share)
    server = LocalServerClient(int(os.environ[SNAPSHOT_CONNECTION_VARIABLE]))
    rows, columns = share.shape
    box = IndexBox((rows * share.number // share.of, 0), (rows * (share.number + 1) // share.of, columns))
    expected = random_leaf(share.shape)[(*box.index_within(IndexBox((0, 0), share.shape)),)]
    print("ready", flush=True)
    for _ in sys.stdin:
        restored = restore(share, server, box)
        print("restored", flush=True)
        assert all(
            np.array_equal(np.asarray(array), expected ^ np.uint32(number))
            for number, array in enumerate(restored)
        )
        del restored
        print("right", flush=True)


def restore(share: Share, server: LocalServerClient, box: IndexBox) -> list[jax.Array]:
    reader = SnapshotReader(
        share.plan, share.host, server, CREDENTIALS, check=lambda: None, record_event=lambda *_, **__: None
    )
    with contextlib.closing(reader):
        slabs = SlabAllocator()
        targets = [
            ReadTarget(number, box, slabs.allocate(box.shape, DTYPE)) for number in range(share.leaves)
        ]
        BoxGatherer(reader).gather(targets)
        return jax.block_until_ready(jax.device_put([target.data for target in targets], jax.devices()[0]))


if __name__ == "__main__":
    main()
