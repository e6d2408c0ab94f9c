"""The hosts together write each element of a state once, each about as much, and no chunk of storage by two of them."""

import itertools
import math
import mmap

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.checkpoint.part_plan import HostCopy, PartPlan, describe_state
from resilient_jax.checkpoint.stored_tree import view_boxes
from resilient_jax.ids import HostName
from resilient_jax.sharding.raveled_array import MAX_PADDING, MAX_UNITS, RaveledArray, compute_padded_size
from resilient_jax.state.index_box import whole_box
from tests.support.eight_devices import eight_devices as eight_devices

SHAPES = {
    "rows": (50257, 16),
    "layers": (5, 130, 96),
    "kernel": (3, 3, 64, 112),
    "prime": (7, 10007),
    "bias": (1000,),
    "few": (8, 9),
}
BALANCE = 1.05


def make_arrays():
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def ravel(array, where):
    padding = compute_padded_size(array.shape, where.mesh.size) - array.size
    return RaveledArray(jax.device_put(np.pad(array.reshape(-1), (0, padding)), where), array.shape)


def make_state(kind, devices, num_hosts, arrays):
    """Return the state, and the host of each device."""
    mesh = Mesh(np.array(devices).reshape(num_hosts, 2), ("host", "local"))
    hosts = [HostName(f"host-{number}") for number in range(num_hosts)]
    host_of = {device: hosts[number // 2] for number, device in enumerate(devices)}
    match kind:
        case "raveled":
            put = ravel, NamedSharding(mesh, P(("host", "local")))
        case "replicated":
            put = jax.device_put, NamedSharding(mesh, P())
        case _:  # as NumPy arrays, which every host has
            put = lambda array, _: array, None
    return {name: put[0](array, put[1]) for name, array in arrays.items()}, hosts, host_of.__getitem__


def read_part(stored, host, host_of, hosts):
    """Return the arrays of a host's part, each with the elements of its boxes, and the part's size."""
    part = PartPlan(stored, host, host_of, hosts).make_part(stored.leaves)
    copy = HostCopy()
    mapped = mmap.mmap(copy.copy(part), 0)
    copy.free()
    return [(leaf, view_boxes(leaf, mapped)) for leaf in part.leaves], part.nbytes


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["raveled", "replicated", "numpy"])
def test_each_element_is_written_once_each_chunk_by_one_host_and_each_host_writes_its_share(
    kind, num_hosts, eight_devices
):
    arrays = make_arrays()
    state, hosts, host_of = make_state(kind, eight_devices[: num_hosts * 2], num_hosts, arrays)
    stored = describe_state(state)
    found = {name: np.full(array.shape, np.nan, array.dtype) for name, array in arrays.items()}
    writer: dict[tuple[str, tuple[int, ...]], HostName] = {}
    sizes = {}
    for host in hosts:
        leaves, sizes[host] = read_part(stored, host, host_of, hosts)
        assert {leaf.path[0].name for leaf, _ in leaves} == set(arrays) or host != hosts[0]
        for leaf, elements in leaves:
            assert leaf.spec is not None
            name, shape = leaf.spec.path, leaf.spec.shape
            for held, values in zip(leaf.boxes, elements, strict=True):
                index = held.box.index_within(whole_box(shape))
                assert np.isnan(found[name][index]).all()
                found[name][index] = values
                chunks = [
                    range(start // length, -(-stop // length))
                    for start, stop, length in zip(*held.box, leaf.grid, strict=True)
                ]
                for place in itertools.product(*chunks):
                    assert writer.setdefault((name, place), host) == host
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert sum(place[0] == name for place in writer) <= MAX_UNITS, "a bound on chunks"
    due = sum(array.nbytes for array in arrays.values()) / num_hosts
    if kind != "raveled":
        assert max(sizes.values()) <= BALANCE * due
    else:
        # A leaf of few rows whose length is a prime has all of a row on one device.
        due += math.prod(SHAPES["prime"]) * 4
        assert max(sizes.values()) <= BALANCE * due


@pytest.mark.parametrize("num_devices", [1, 2, 3, 6, 8, 64])
def test_the_padding_of_a_raveled_array_is_small_unless_its_rows_are_few_and_long(num_devices):
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        padded = compute_padded_size(shape, num_devices)
        assert padded >= size
        assert padded % num_devices == 0
        if name != "prime":
            assert padded <= max(size * (1 + MAX_PADDING), size + num_devices)
