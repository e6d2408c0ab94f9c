"""A change wakes the watchers of its key and no others; all wake now and then, to know how far the store is."""

import asyncio

from resilient_jax.ids import Revision
from resilient_jax.store.interface import DeleteEvent, PutOp
from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.watch_channels import QUIET_REVISIONS, WatchChannels
from tests.support.patience import patience


def delete(key: str, revision: int) -> DeleteEvent:
    return DeleteEvent(key=key, mod_revision=Revision(revision))


def is_woken(channel) -> bool:
    return channel._woken.is_set()


def test_only_watchers_of_what_has_changed_are_woken_and_know_where_to_read_on():
    channels = WatchChannels()
    all_keys, hosts, one, other = (channels.get(prefix) for prefix in ("", "/hosts/", "/hosts/a", "/job"))
    changes = [(Revision(7), (delete("/hosts/b", 7),)), (Revision(8), (delete("/hosts/c", 8),))]
    channels.tell(changes, Revision(8))
    assert [is_woken(c) for c in (all_keys, hosts, one, other)] == [True, True, False, False]
    assert (all_keys.resume_from, hosts.resume_from) == (7, 7)
    assert channels.get("/hosts/") is not hosts, "who comes now waits for the next change"
    assert channels.get("/job") is other


def test_all_are_woken_after_many_revisions():
    channels = WatchChannels()
    quiet = channels.get("/quiet")
    channels.tell([], Revision(QUIET_REVISIONS - 1))
    assert not is_woken(quiet)
    channels.tell([], Revision(QUIET_REVISIONS))
    assert is_woken(quiet)
    assert quiet.resume_from == QUIET_REVISIONS + 1


def test_a_watch_of_a_quiet_prefix_outlives_more_revisions_than_the_history_keeps():
    async def run() -> None:
        async with MemoryStore(keep_revisions=QUIET_REVISIONS) as store, asyncio.timeout(patience(2)):
            changes = store.watch("/quiet", Revision(store.revision + 1))
            reading = asyncio.ensure_future(anext(changes))
            for number in range(3 * QUIET_REVISIONS):
                await store.transaction([], [PutOp("/busy", b"%d" % number)], [])
                if number % 100 == 0:
                    await asyncio.sleep(0)
            await store.transaction([], [PutOp("/quiet", b"now")], [])
            (event,) = await reading
            assert event.key == "/quiet"
            await changes.aclose()

    asyncio.run(run())
