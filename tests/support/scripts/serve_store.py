"""A process that serves a store at the address argv[1] until stdin ends, and prints the address that it got.

With argv[2] it is the store of that journal.
"""

import asyncio
import sys
from pathlib import Path

from resilient_jax.store.lease_renewals import RenewalServer
from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.service import serve_store
from resilient_jax.transport import Credentials, Server

CREDENTIALS = Credentials("test-token")


async def main() -> None:
    server = Server(sys.argv[1], credentials=CREDENTIALS)
    journaled = sys.argv[2:]
    async with MemoryStore.from_journal(Path(journaled[0])) if journaled else MemoryStore() as store:
        renewals = RenewalServer(sys.argv[1], CREDENTIALS, store)
        serve_store(server, store, renewals)
        async with server, renewals:
            print(server.address, flush=True)
            await asyncio.to_thread(
                sys.stdin.read
            )  # stdin closes when the test process ends, however it ends


if __name__ == "__main__":
    asyncio.run(main())
