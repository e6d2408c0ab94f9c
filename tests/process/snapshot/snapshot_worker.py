"""A worker process for tests: opens the layout argv[1], then runs action argv[2] on the snapshot argv[3].

- `copy`: begins the snapshot, writes half of the part, prints "half", and waits to be killed.
- `take`: begins the snapshot, writes the part, finishes it, prints "taken", and waits to be killed.
- `held`: prints the length and the CRC-32 of the part in the server's memory, or "nothing".
"""

import os
import signal
import sys
import zlib

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout
from resilient_jax.protocol.worker_messages import SNAPSHOT_CONNECTION_VARIABLE
from resilient_jax.snapshot.local_client import LocalServerClient
from resilient_jax.snapshot.manifest import PartContents
from tests.support.snapshot_servers import make_part


def main() -> None:
    layout = msgspec.json.decode(sys.argv[1], type=SnapshotLayout)
    action, id, host = sys.argv[2], msgspec.json.decode(sys.argv[3], type=SnapshotId), HostName(sys.argv[4])
    server = LocalServerClient(int(os.environ[SNAPSHOT_CONNECTION_VARIABLE]))
    server.open_layout(layout)
    if action == "held":
        held = server.open_own_part(id)
        print("nothing" if held is None else f"{len(held[1])} {zlib.crc32(held[1])}", flush=True)
        return
    view = server.begin(id)
    part = make_part(id, host, len(view))
    half = len(view) // 2
    view[:half] = part[:half]
    if action == "copy":
        print("half", flush=True)
        signal.pause()
    view[half:] = part[half:]
    server.finish(id, PartContents())
    print("taken", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
