"""The memory that snapshots need and the memory that is free."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import SnapshotRefused
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.snapshots import SnapshotLayout
from resilient_jax.snapshot.memory_budget import (
    MANIFEST_BYTES,
    FreeMemory,
    RequiredMemory,
    check_memory,
    compute_required_memory,
    read_free_memory,
)
from resilient_jax.snapshot.parity_groups import form_parity_groups

GIB = 2**30
A = HostName("a")


def layout(part_bytes, parity, size=8):
    names = [HostName(f"h{index}") for index in range(len(part_bytes))]
    return SnapshotLayout(
        generation=GenerationNumber(1),
        groups=form_parity_groups(names, parity, group_size=size),
        part_bytes=dict(zip(names, part_bytes, strict=True)),
        server_endpoints=dict.fromkeys(names, ""),
        root=names[0],
    )


def test_eight_hosts_with_parity_two_need_a_third_more_memory_in_each_slot():
    needed = compute_required_memory(layout([6 * GIB] * 8, 2), HostName("h3"))
    assert (needed.part_bytes, needed.parity_bytes) == (6 * GIB, 2 * GIB)
    assert needed.total_bytes == 2 * (8 * GIB + needed.metadata_bytes)
    assert needed.metadata_bytes < 10 * MANIFEST_BYTES


@given(st.lists(st.integers(0, 2**36), min_size=1, max_size=12), st.integers(0, 4))
def test_parity_memory_follows_from_the_longest_part_of_the_group(parts, parity):
    plan = layout(parts, parity)
    for host, nbytes in plan.part_bytes.items():
        group = plan.find_group(host)
        k = len(group.hosts) - group.parity
        needed = compute_required_memory(plan, host)
        longest = max(plan.part_bytes[member] for member in group.hosts)
        assert needed.part_bytes == nbytes
        rounded = max(longest * 9 / 8, longest + k * 4096)
        assert group.parity * longest <= needed.parity_bytes * k <= group.parity * rounded
        assert needed.total_bytes >= 2 * (needed.part_bytes + needed.parity_bytes)


def needed_total(nbytes):
    return RequiredMemory(part_bytes=nbytes // 2, parity_bytes=0, metadata_bytes=0)


def test_exactly_enough_memory_suffices_and_a_byte_less_does_not():
    check_memory(needed_total(8 * GIB), FreeMemory(available_bytes=8 * GIB), A)
    with pytest.raises(SnapshotRefused):
        check_memory(needed_total(8 * GIB), FreeMemory(available_bytes=8 * GIB - 1), A)
    check_memory(
        needed_total(8 * GIB), FreeMemory(available_bytes=8 * GIB, limit_bytes=9 * GIB, used_bytes=GIB), A
    )
    with pytest.raises(SnapshotRefused):
        check_memory(
            needed_total(8 * GIB),
            FreeMemory(available_bytes=8 * GIB, limit_bytes=9 * GIB, used_bytes=GIB + 1),
            A,
        )
    check_memory(needed_total(8 * GIB), FreeMemory(available_bytes=3 * GIB), A, reclaimed_bytes=5 * GIB)


def test_the_refusal_has_the_amounts_and_what_to_do():
    needed = RequiredMemory(part_bytes=6 * GIB, parity_bytes=2 * GIB, metadata_bytes=2**20)
    with pytest.raises(SnapshotRefused) as refused:
        check_memory(
            needed,
            FreeMemory(available_bytes=64 * GIB, limit_bytes=16 * GIB, used_bytes=4 * GIB),
            A,
            reclaimed_bytes=2**30,
        )
    assert str(refused.value) == (
        "host a: snapshots need 16.00 GiB of memory (2 slots with 6.00 GiB of state, 2.00 GiB of parity and 1.0 MiB of "
        "metadata each), expected at most 13.00 GiB: the machine has 64.00 GiB available, its control group allows "
        "16.00 GiB and uses 4.00 GiB, and 1.00 GiB are used by earlier snapshots. Give the host or its container more "
        "memory, use more hosts (each then keeps less), lower the parity or make groups larger, or switch snapshots off"
    )
    with pytest.raises(SnapshotRefused, match="no control group limits it"):
        check_memory(needed, FreeMemory(available_bytes=GIB), A)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       100 kB\nMemAvailable:   8388608 kB\nHugePages_Total:       0\n"


def test_the_tightest_cgroup_of_version_two_counts_without_its_page_cache(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/worker\n",
            "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pod/worker/memory.max": "max\n",
            "sys/fs/cgroup/pod/worker/memory.current": "5\n",
        },
    )
    found = read_free_memory(root)
    assert found == FreeMemory(available_bytes=8 * GIB, limit_bytes=4 * GIB, used_bytes=2 * GIB)
    assert found.free_bytes == 2 * GIB


def test_a_container_may_see_only_its_own_cgroup_of_version_two(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{GIB}",
            "sys/fs/cgroup/memory.current": f"{2 * GIB}",
        },
    )
    assert read_free_memory(root).free_bytes == 0


def test_a_cgroup_of_version_one_may_not_be_mounted_under_its_path(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {2 * GIB}\n",
        },
    )
    assert read_free_memory(root) == FreeMemory(available_bytes=8 * GIB, limit_bytes=4 * GIB, used_bytes=GIB)


def test_a_cgroup_of_version_one_may_have_no_limit(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "77\n",
        },
    )
    assert read_free_memory(root) == FreeMemory(available_bytes=8 * GIB)


def test_a_machine_that_does_not_report_its_free_memory_is_refused(tmp_path):
    with pytest.raises(SnapshotRefused, match="does not say how much memory is available"):
        read_free_memory(tmp_path)
    write(tmp_path, {"proc/meminfo": "MemTotal: 7 kB\n"})
    with pytest.raises(SnapshotRefused, match="MemAvailable"):
        read_free_memory(tmp_path)


def test_this_machine_reports_its_free_memory():
    assert 0 < read_free_memory().free_bytes < 2**50
