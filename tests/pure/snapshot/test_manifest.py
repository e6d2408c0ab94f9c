"""A manifest round-trips or is refused; its block checksums detect changes of the part."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.erasure import ChecksumName, choose_checksum
from resilient_jax.errors import ChecksumMismatch, MessageError
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot import manifest as manifest_module
from resilient_jax.snapshot.manifest import (
    LeafSlice,
    PartContents,
    PartManifest,
    checksum_blocks,
    count_blocks,
    decode_manifest,
    encode_manifest,
    find_corrupt_block,
)

sizes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
leaves = st.builds(
    LeafSpec,
    st.text(max_size=12),
    st.sampled_from(["float32", "bfloat16", "int4", "float8_e4m3fn", "bool"]),
    sizes,
    st.none() | st.just("threefry2x32"),
)
pieces = st.builds(LeafSlice, st.integers(0, 99), sizes, sizes, st.integers(0, 2**50))


@st.composite
def manifests(draw):
    part_bytes, block_bytes = draw(st.integers(0, 5000)), draw(st.sampled_from([512, 4096]))
    count = count_blocks(part_bytes, block_bytes)
    return PartManifest(
        id=SnapshotId(draw(st.integers(0, 2**62)), GenerationNumber(draw(st.integers(0, 2**31)))),
        host=HostName(draw(st.text(max_size=8))),
        contents=PartContents(
            tuple(draw(st.lists(leaves, max_size=3))),
            tuple(draw(st.lists(pieces, max_size=3))),
            draw(st.dictionaries(st.text(max_size=4), st.text(max_size=8), max_size=2)),
        ),
        part_bytes=part_bytes,
        checksum=draw(st.sampled_from(list(ChecksumName))),
        block_bytes=block_bytes,
        block_checksums=tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count))),
    )


@given(manifests())
def test_a_manifest_round_trips(manifest):
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert decode_manifest(memoryview(bytearray(encode_manifest(manifest)))) == manifest


@given(manifests())
def test_every_flipped_bit_is_detected(manifest):
    data = bytearray(encode_manifest(manifest))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChecksumMismatch, match="corrupt"):
            decode_manifest(data)
        data[bit // 8] ^= 1 << bit % 8
    assert decode_manifest(data) == manifest


@given(manifests(), st.data())
def test_a_truncated_or_extended_manifest_is_detected(manifest, data):
    whole = encode_manifest(manifest)
    with pytest.raises(ChecksumMismatch):
        decode_manifest(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ChecksumMismatch):
        decode_manifest(whole + b"\0")


def example_manifest(**changes):
    values = {
        "id": SnapshotId(3, GenerationNumber(1)),
        "host": HostName("a"),
        "contents": PartContents(),
        "part_bytes": 1000,
        "checksum": ChecksumName.CRC32,
        "block_bytes": 512,
        "block_checksums": (1, 2),
    }
    return PartManifest(**(values | changes))


def test_another_version_is_refused_with_both_versions(monkeypatch):
    monkeypatch.setattr(manifest_module, "VERSION", manifest_module.VERSION + 1)
    newer = encode_manifest(example_manifest())
    monkeypatch.undo()
    with pytest.raises(MessageError, match=r"has version 3, this resilient_jax reads version 2"):
        decode_manifest(newer)


@pytest.mark.parametrize(
    "changes", [{"block_checksums": (1,)}, {"block_bytes": 0}, {"part_bytes": -1}, {"block_checksums": ()}]
)
def test_sizes_that_contradict_each_other_are_refused(changes):
    with pytest.raises(MessageError, match=r"manifest of a: found \d block checksums, expected"):
        decode_manifest(encode_manifest(example_manifest(**changes)))


def test_a_body_that_does_not_decode_is_refused(monkeypatch):
    monkeypatch.setattr(msgspec.msgpack, "encode", lambda value: b"\x93\x01\x02\x03")
    data = encode_manifest(example_manifest())
    monkeypatch.undo()
    with pytest.raises(MessageError, match="manifest does not decode as PartManifest: Expected `object`"):
        decode_manifest(data)


@pytest.mark.parametrize("name", list(ChecksumName))
@given(st.binary(max_size=3000), st.data())
def test_the_block_of_a_flipped_bit_is_found(name, part, data):
    checksum = choose_checksum(name)
    manifest = example_manifest(
        part_bytes=len(part),
        checksum=name,
        block_bytes=512,
        block_checksums=checksum_blocks(part, checksum, 512),
    )
    assert count_blocks(len(part), 512) == len(manifest.block_checksums)
    first = data.draw(st.integers(0, max(0, len(manifest.block_checksums) - 1))) * 512
    assert find_corrupt_block(manifest, checksum, first, part[first:]) is None
    if len(part) > first:
        bit = data.draw(st.integers(8 * first, 8 * len(part) - 1))
        damaged = bytearray(part)
        damaged[bit // 8] ^= 1 << bit % 8
        assert find_corrupt_block(manifest, checksum, first, memoryview(damaged)[first:]) == bit // 8 // 512
