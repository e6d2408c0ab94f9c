"""The generations of a job, read from the store as they are published."""

import contextlib
from collections.abc import AsyncGenerator

from resilient_jax.cluster.stored_records import decode_change, decode_generation
from resilient_jax.ids import JobName, Revision
from resilient_jax.protocol.generation_change import apply_change
from resilient_jax.protocol.records import Generation
from resilient_jax.protocol.store_keys import make_change_key, make_generation_key
from resilient_jax.store.interface import PutEvent, Store


async def read_generations(store: Store, job: JobName) -> AsyncGenerator[Generation, None]:
    """Yield the stored generation and each later one, until the watch fails; close it to stop before.

    Only changes are read, and the record where one does not fit to what was read before.

    Raises:
        PeerError: the store does not answer, or no longer has the changes that were missed.
        JoinRefused: what is stored is no generation.
    """
    key = make_generation_key(job)
    revision, records = await store.range(key)
    known = decode_generation(records[0]) if records else None
    if known is not None:
        yield known
    async with contextlib.aclosing(store.watch(make_change_key(job), Revision(revision + 1))) as batches:
        async for batch in batches:
            for event in batch:
                if not isinstance(event, PutEvent) or event.mod_revision <= revision:
                    continue  # of a record that was read since
                known = apply_change(known, decode_change(event.key_value))
                if known is None and (record := await store.get(key)) is not None:
                    known, revision = decode_generation(record), record.mod_revision
                if known is not None:
                    yield known
