"""The worlds that may come next, for which programs are compiled ahead. Pure.

A compiled program serves all worlds whose hosts have the same numbers of devices, in the order of the mesh: which hosts
these are is not in its key (see `jax_runtime.compile_cache`). So of hosts that stand side by side and have equally many
devices it does not matter which is lost, and of a world of equal hosts three worlds come next.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from resilient_jax.jax_runtime.jaxlib_types import Device

MAX_HOSTS_FOR_ALL_PAIRS: Final = 8
"""Up to so many candidates every two may be lost together; beyond, neighbors only: in a world of hosts that differ this
much no list is complete."""


def list_likely_worlds(
    devices: Sequence[Device], spare_devices: Sequence[Device], process_index: int
) -> list[tuple[Device, ...]]:
    """Return the devices of the worlds that are likely next, the likeliest first: one host fewer, one more, two fewer.

    Args:
        devices: all devices of the live hosts, host by host in the order of the mesh.
        spare_devices: all devices of the seats that no host has, in the order in which these are taken: a host that
            joins comes last in the mesh.
        process_index: position of this host, which is in each of these worlds.
    """
    by_host = _group_by_host(devices)
    candidates = _list_candidates(by_host, process_index)
    pairs = (
        itertools.combinations(candidates, 2)
        if len(candidates) <= MAX_HOSTS_FOR_ALL_PAIRS
        else itertools.pairwise(candidates)
    )
    # One world for each sequence of numbers of devices: a program for it serves all others with the same.
    by_counts: dict[tuple[int, ...], tuple[Device, ...]] = {}
    for world in (
        *(_without(by_host, lost) for lost in candidates),
        *([*by_host, joining] for joining in _group_by_host(spare_devices)[:1]),
        *(_without(by_host, *pair) for pair in pairs),
    ):
        by_counts.setdefault(tuple(map(len, world)), tuple(device for of_host in world for device in of_host))
    return list(by_counts.values())


def _group_by_host(devices: Sequence[Device]) -> list[list[Device]]:
    by_host: dict[int, list[Device]] = {}
    for device in devices:
        by_host.setdefault(device.process_index, []).append(device)
    return list(by_host.values())


def _list_candidates(by_host: Sequence[Sequence[Device]], process_index: int) -> list[int]:
    """Return the hosts to leave out: of each run of hosts with equally many devices the first two that are others."""
    others = [place for place, own in enumerate(by_host) if own[0].process_index != process_index]

    def get_run(place: int) -> int:
        return runs[place]

    runs = list(_number_runs([len(of_host) for of_host in by_host]))
    return [place for _, run in itertools.groupby(others, get_run) for place in itertools.islice(run, 2)]


def _number_runs(counts: Sequence[int]) -> Iterator[int]:
    """Yield for each host the number of the run that it is in."""
    for number, (_, run) in enumerate(itertools.groupby(counts)):
        yield from itertools.repeat(number, len(list(run)))


def _without(by_host: Sequence[list[Device]], *lost: int) -> list[list[Device]]:
    return [of_host for place, of_host in enumerate(by_host) if place not in lost]
