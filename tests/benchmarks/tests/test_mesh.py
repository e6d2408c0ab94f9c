"""What the mesh benchmark reads from the files of its job."""

import math

import pytest

from resilient_jax.errors import InternalError
from tests.benchmarks.mesh.figures import (
    BoxRow,
    are_equal_boxes,
    describe,
    find_largest_share,
    find_written_share,
    read_rows,
)


def row(step, boxes, size=50):
    return BoxRow(step=step, boxes=boxes, bytes=size, whole_bytes=100)


UNDISTURBED = [row(0, {"a": "1"}), row(0, {"b": "2"}), row(1, {"a": "3"}), row(1, {"b": "4"})]


def test_boxes_are_equal_if_each_is_there_after_each_step_and_no_process_has_another() -> None:
    assert are_equal_boxes([*UNDISTURBED, row(1, {"a": "3"})], UNDISTURBED)
    assert not are_equal_boxes([*UNDISTURBED, row(1, {"a": "0"})], UNDISTURBED)
    assert not are_equal_boxes([*UNDISTURBED, row(2, {"a": "3"})], UNDISTURBED)
    assert not are_equal_boxes(UNDISTURBED[:-1], UNDISTURBED)
    assert not are_equal_boxes([], [])


def test_the_fullest_host_counts() -> None:
    assert find_largest_share([row(0, {}, 0), row(0, {}, 51)], hosts_of_replica=2) == pytest.approx(1.02)


def test_what_each_host_wrote_of_a_checkpoint_is_counted(tmp_path) -> None:
    for number, size in ((0, 30), (1, 60)):
        part = tmp_path / "default" / f"ocdbt.process_{number}" / "d"
        part.mkdir(parents=True)
        (part / "values").write_bytes(bytes(size))
    assert find_written_share(tmp_path, 100, hosts_of_replica=2) == pytest.approx(1.2)
    with pytest.raises(InternalError, match="expected one of each host"):
        find_written_share(tmp_path / "default" / "ocdbt.process_0", 100, 2)


def test_a_spread_is_less_a_step_and_counts_its_values() -> None:
    found = describe([1.5, 1.0, 3.0], less=0.5)
    assert (found.median, found.least, found.most, found.count) == (1.0, 0.5, 2.5, 3)
    assert math.isnan(describe([]).median)


def test_a_line_that_a_killed_process_left_half_is_left_out(tmp_path) -> None:
    whole = '{"step":3,"boxes":{"a":"1"},"bytes":5,"whole_bytes":9}'
    (tmp_path / "boxes-7.jsonl").write_text(f"{whole}\n{whole[:20]}")
    assert read_rows(tmp_path) == [BoxRow(step=3, boxes={"a": "1"}, bytes=5, whole_bytes=9)]
