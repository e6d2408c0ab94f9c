"""The storage process reads the requested boxes of a checkpoint, and little more of its files."""

import asyncio
import mmap
import os

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.checkpoint import orbax_reader, part_writer
from resilient_jax.checkpoint.orbax_reader import ByteBudget, check_readable, inspect_checkpoint, read_boxes
from resilient_jax.checkpoint.stored_tree import StoredBox, align_offset, allocate_memory, view_box
from resilient_jax.errors import CheckpointUnreadable
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.state.index_box import IndexBox, whole_box
from tests.support.whole_checkpoints import write_whole

KIB = 2**10
CHUNK_BYTES = 64 * KIB
ROWS, COLUMNS = 1024, 512
NAMES = ("wide", "tall", "half", "byte", "one")


@pytest.fixture(scope="module")
def tree():
    """Random elements, which cannot be compressed."""
    rng = np.random.default_rng(0)
    return {
        "wide": rng.random((ROWS, COLUMNS), np.float32),
        "tall": rng.random((7 * ROWS,), np.float32),
        "half": np.asarray(jnp.asarray(rng.random((96, 128)), jnp.bfloat16)),
        "byte": rng.integers(0, 255, (5, 3, 64, 67), np.uint8),
        "one": np.array(7, np.int32),
    }


@pytest.fixture(scope="module", params=["ours", "plain Orbax's", "plain Orbax's, without OCDBT"])
def folder(request, tree, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    if request.param == "ours":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part_writer, "CHUNK_BYTES", CHUNK_BYTES)
            write_whole(directory, 1, tree)
    else:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt="without" not in request.param)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory / "1" / "default", args=ocp.args.PyTreeSave(tree))
    return directory / "1"


def read_named_boxes(folder, tree, boxes):
    """Return the elements of each (name, box)."""
    stored, end = [], 0
    for name, box in boxes:
        spec = LeafSpec(name, str(tree[name].dtype), tree[name].shape)
        stored.append(StoredBox(spec=spec, box=box, offset=align_offset(end)))
        end = stored[-1].offset + stored[-1].nbytes
    descriptor = allocate_memory(end)
    try:
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    read_boxes(folder, stored, memory)
    return [view_box(box, memory).copy() for box in stored]


def test_a_checkpoint_is_inspected_without_reading_its_arrays(folder, tree, caplog):
    arrays, by_digests = inspect_checkpoint(folder)
    assert caplog.messages == []  # such as Orbax's, that an item has no metadata of its own
    assert by_digests == (folder / "resilient_jax.sha256").exists()
    found = {spec.path: (spec.shape, spec.dtype) for spec in arrays}
    assert found == {name: (value.shape, str(value.dtype)) for name, value in tree.items()}


@st.composite
def some_boxes(draw, shapes):
    name = draw(st.sampled_from(NAMES))
    bounds = [
        draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda b: b[0] < b[1]))
        for n in shapes[name]
    ]
    return name, IndexBox(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))


@given(data=st.data())
def test_any_boxes_are_those_of_the_whole_arrays(folder, tree, data):
    shapes = {name: value.shape for name, value in tree.items()}
    boxes = data.draw(st.lists(some_boxes(shapes), min_size=1, max_size=4))
    for (name, box), found in zip(boxes, read_named_boxes(folder, tree, boxes), strict=True):
        expected = tree[name][box.index_within(whole_box(tree[name].shape))]
        assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes())


def bytes_from_files():
    """Return how many bytes TensorStore has read in this process, by its own count."""
    (metric,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(int(value["value"]) for value in metric["values"])


@pytest.mark.parametrize("dim", [0, 1])
def test_of_our_checkpoints_a_quarter_of_an_array_takes_a_quarter_of_the_reading(tree, dim, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_writer, "CHUNK_BYTES", CHUNK_BYTES)
        write_whole(tmp_path, 1, tree)
    quarter = IndexBox((0, 0), (ROWS, COLUMNS)).narrow(dim, 0, (ROWS, COLUMNS)[dim] // 4)
    before = bytes_from_files()
    (found,) = read_named_boxes(tmp_path / "1", tree, [("wide", quarter)])
    read_bytes = bytes_from_files() - before
    assert found.nbytes * 4 == tree["wide"].nbytes
    assert read_bytes < found.nbytes + 4 * CHUNK_BYTES


def test_a_budget_bounds_what_is_in_the_air_and_lets_what_is_larger_through_alone():
    async def spend_all():
        budget, now, seen = ByteBudget(10), [0], []

        async def spend(nbytes):
            async with budget.spend(nbytes):
                now[0] += nbytes
                seen.append(now[0])
                for _ in range(3):
                    await asyncio.sleep(0)
                now[0] -= nbytes

        await asyncio.gather(*map(spend, (4, 4, 4, 25, 3, 10, 1, 7)))
        return seen

    seen = asyncio.run(spend_all())
    assert len(seen) == 8
    assert {most for most in seen if most > 10} == {25}
    assert 8 in seen, "two at once"


@pytest.mark.parametrize("limit_bytes", [1, 2**17])
def test_a_budget_smaller_than_a_chunk_makes_reading_slow_and_no_different(
    folder, tree, limit_bytes, monkeypatch
):
    monkeypatch.setattr(orbax_reader, "MAX_DECODED_BYTES", limit_bytes)
    boxes = [(name, whole_box(value.shape)) for name, value in tree.items()]
    for (name, _), found in zip(boxes, read_named_boxes(folder, tree, boxes), strict=True):
        assert found.tobytes() == tree[name].tobytes()


def test_missing_elements_are_found_without_digests(tree, tmp_path):
    ocp.PyTreeCheckpointer().save(tmp_path / "1" / "default", tree)
    check_readable(tmp_path / "1")
    largest = max((p for p in (tmp_path / "1").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(CheckpointUnreadable, match="Orbax cannot read it"):
        check_readable(tmp_path / "1")


def test_a_tree_with_leaves_that_are_no_arrays_can_be_inspected(tmp_path):
    ocp.PyTreeCheckpointer().save(
        tmp_path / "1" / "default", {"a": np.ones(3), "name": "run 5", "n": 3, "empty": {}}
    )
    arrays, _ = inspect_checkpoint(tmp_path / "1")
    assert {spec.path: spec.dtype for spec in arrays} == {"a": "float64", "n": "int64"}
