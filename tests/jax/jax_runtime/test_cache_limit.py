"""The directory of compiled programs stays below its limit, and few writes look at all of it."""

import os

from resilient_jax.jax_runtime import compile_cache
from resilient_jax.jax_runtime.compile_cache import (
    CACHE_SUFFIX,
    WRITTEN_BETWEEN_LOOKS,
    DirectoryLimit,
    evict_oldest,
)


def write(directory, name, num_bytes, used_s):
    path = directory / f"{name}{CACHE_SUFFIX}"
    path.write_bytes(bytes(num_bytes))
    os.utime(path, (used_s, used_s))


def names(directory):
    return sorted(path.name.removesuffix(CACHE_SUFFIX) for path in directory.glob(f"*{CACHE_SUFFIX}"))


def test_entries_that_were_used_longest_ago_are_evicted_first(tmp_path):
    for name, used_s in [("old", 1), ("new", 3), ("middle", 2)]:
        write(tmp_path, name, 10, used_s)
    assert evict_oldest(tmp_path, 20) == 1
    assert names(tmp_path) == ["middle", "new"]


def test_the_newest_entry_stays_though_it_alone_is_too_large(tmp_path):
    write(tmp_path, "old", 10, 1)
    write(tmp_path, "large", 100, 2)
    assert evict_oldest(tmp_path, 20) == 1
    assert names(tmp_path) == ["large"]


def test_a_process_looks_at_its_first_entry_and_then_when_it_has_written_a_part_of_the_limit(
    tmp_path, monkeypatch
):
    looks = []
    monkeypatch.setattr(
        compile_cache, "evict_oldest", lambda directory, limit: looks.append((directory, limit))
    )
    num_bytes = 10
    limit = DirectoryLimit(num_bytes * WRITTEN_BETWEEN_LOOKS)
    for _ in range(4):
        limit.note_written(tmp_path, num_bytes // 2)
    assert looks == [(tmp_path, num_bytes * WRITTEN_BETWEEN_LOOKS)] * 2
