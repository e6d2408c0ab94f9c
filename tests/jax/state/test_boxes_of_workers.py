"""Boxes of a state that live workers hold, with copies, are gathered bit for bit on any mesh, whoever fails."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.host_shards import copy_held_boxes
from resilient_jax.state.index_box import whole_box
from resilient_jax.state.peer_transfer import StateOffer
from resilient_jax.state.restore import read_whole_state, restore_snapshot
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.fake_snapshots import abstract_of, assert_same, plain, shardings, snapshot_id, states

HOSTS = [HostName(name) for name in "abc"]


class OfferReader:
    """A `PartReader` of offers in this process, of which a host may fail after some reads."""

    has_copies = True

    def __init__(self, offers, local, victim, reads_before):
        self.offers, self.local_host, self.victim, self.left = offers, local, victim, reads_before
        self.bytes_read = 0

    def read_manifests(self):
        return {host: offer.part for host, offer in self.offers.items()}

    def read_all(self, reads):
        failed = []
        for number, (host, offset, target) in enumerate(reads):
            if host == self.victim:
                self.left -= 1
                if self.left < 0:
                    target[:] = b"\xa5" * len(target)
                    failed.append(number)
                    self.offers.pop(host, None)
                    continue
            target[:] = self.offers[host].view(offset, len(target))
            self.bytes_read += len(target)
        return failed


def draw_offers(data, state, safe):
    """Return what three hosts hold: each shard is on some of them, one of `safe` included; or they have all of it."""
    flat = flatten_state(3, state)
    held = {host: [] for host in HOSTS}
    for number, leaf in enumerate(flat.leaves):
        if data.draw(st.booleans()):  # another layout than that of the others
            held[data.draw(st.sampled_from(HOSTS))].append(
                (number, whole_box(leaf.shape), np.asarray(leaf.value))
            )
        for box, array in copy_held_boxes(leaf).items():
            having = data.draw(st.sets(st.sampled_from(HOSTS), min_size=1)) | {
                data.draw(st.sampled_from(safe))
            }
            for host in having:
                held[host].append((number, box, array))
    leaves = [leaf.spec for leaf in flat.leaves]
    return {host: StateOffer(snapshot_id(), host, leaves, held[host], flat.strings) for host in HOSTS}


@given(st.data(), states(), st.integers(0, 3))
def test_a_state_in_parts_is_gathered_on_another_mesh_though_a_host_fails(data, state, reads_before):
    offers = draw_offers(data, state, safe=HOSTS[1:])
    reader = OfferReader(offers, HOSTS[1], HOSTS[0], reads_before)
    targets = {f"['{name}']": data.draw(shardings(leaf.shape)) for name, leaf in state.items()}
    step, restored = restore_snapshot(abstract_of(state), reader, lambda path, leaf: targets[path])
    assert step == 3
    assert_same(restored, state)


@given(st.data(), states())
def test_all_of_a_state_in_parts_is_gathered_in_host_memory_with_each_byte_read_once(data, state):
    reader = OfferReader(draw_offers(data, state, safe=HOSTS), None, None, 0)
    found = read_whole_state(reader)
    assert [plain(leaf.value) for leaf in found.leaves] == [plain(leaf) for leaf in state.values()]
    assert reader.bytes_read == found.nbytes
