"""Run by tests as a process: serves a store at argv[1] until stdin ends; prints its address."""

import asyncio
import sys

from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.service import serve_store
from resilient_jax.transport import Credentials, Server


async def main() -> None:
    server = Server(sys.argv[1], credentials=Credentials("test-token"))
    async with MemoryStore() as store:
        serve_store(server, store)
        async with server:
            print(server.address, flush=True)
            await asyncio.to_thread(sys.stdin.read)  # ends with the test, however that ends


if __name__ == "__main__":
    asyncio.run(main())
