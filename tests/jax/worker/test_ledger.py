"""Digests of a state: equal for any sharding, different if any bit differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.protocol.ledger import MicrobatchEntry, StepEntry
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.worker import ledger
from resilient_jax.worker.ledger import Ledger, compute_additive_digest, compute_sha256
from tests.chaos.ledger_invariants import combine_sums
from tests.chaos.ledgers import tail_ledger
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module

SHAPES = {"matrix": (6, 10), "scalar": (), "long": (17,), "empty": (0, 3)}
DTYPES = (np.float32, np.int32, np.uint8, np.bool_, jnp.bfloat16)


def make_state() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        f"{name} {np.dtype(dtype).name}": (100 * random.standard_normal(shape)).astype(dtype)
        for name, shape in SHAPES.items()
        for dtype in DTYPES
    }


def test_any_bit_of_any_element_changes_the_digest() -> None:
    state = make_state()
    expected = (
        compute_additive_digest(flatten_state(1, state), is_first=True),
        compute_sha256(flatten_state(1, state)),
    )
    seen = {expected}
    for name, value in state.items():
        for place in range(0, value.nbytes, 7):
            changed = bytearray(value.tobytes())
            changed[place] ^= 1
            other = {**state, name: np.frombuffer(bytes(changed), value.dtype).reshape(value.shape)}
            seen.add(
                (
                    compute_additive_digest(flatten_state(1, other), is_first=True),
                    compute_sha256(flatten_state(1, other)),
                )
            )
    total = sum(1 + (value.nbytes - 1) // 7 for value in state.values() if value.nbytes)
    assert len(seen) == total + 1
    assert len({sums for sums, _ in seen}) == total + 1, "the sums alone tell, too"


def test_swapping_two_elements_changes_the_digest() -> None:
    one, other = np.array([1.0, 2.0], np.float32), np.array([2.0, 1.0], np.float32)
    assert compute_additive_digest(flatten_state(1, {"a": one}), is_first=True) != compute_additive_digest(
        flatten_state(1, {"a": other}), is_first=True
    )
    assert compute_additive_digest(
        flatten_state(1, {"a": one, "b": other}), is_first=True
    ) != compute_additive_digest(flatten_state(1, {"a": other, "b": one}), is_first=True)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("y", "x"), P()])
def test_digests_of_shards_add_up_to_the_digest_of_the_array(spec: P) -> None:
    """Each device acts as a host with its shards; no array counts as local."""
    value = np.random.default_rng(1).standard_normal((8, 12)).astype(np.float32)
    whole = compute_additive_digest(flatten_state(1, {"a": value}), is_first=True)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x"))
    placed = jax.device_put(value, NamedSharding(mesh, spec))
    (leaf,) = flatten_state(1, {"a": placed}).leaves
    seed = ledger.zlib.crc32(ledger._leaf_name(leaf))
    sums = []
    for shard in placed.addressable_shards:
        if shard.replica_id == 0:
            start = [cut.start or 0 for cut in shard.index]
            mixed = ledger._mix(np.asarray(shard.data), start, value.shape, seed)
            sums.append("".join(f"{lane:016x}" for lane in mixed))
    assert combine_sums(sums) == whole


def test_a_ledger_is_read_without_its_incomplete_last_line(tmp_path) -> None:
    written = Ledger(tmp_path, "host-0")
    written.record_microbatch(0, 3, 1)
    state = flatten_state(1, make_state())
    written.record_commit(state, 1, 2, {"train": ["host-0"]}, is_first=True)
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes() + b'{"type":"begun","ho')
    begun, committed = tail_ledger(tmp_path).poll()
    assert isinstance(begun, MicrobatchEntry)
    assert begun.index == 3
    assert isinstance(committed, StepEntry)
    assert (committed.step, committed.state_sha256, committed.owners) == (
        0,
        compute_sha256(state),
        {"train": ("host-0",)},
    )
