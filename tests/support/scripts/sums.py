"""A job that compares sums over hosts with those of one host and of numpy; exits with 0 if all are as they should."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from resilient_jax.ids import ProcessIndex
from resilient_jax.protocol.failpoints import Corruption, FailPoint
from resilient_jax.state.state_digest import make_no_state_digest
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.contributions import Contribution, Contributions
from resilient_jax.step.data_sample import DataSample
from resilient_jax.step.fixed_point_sum import choose_limits, find_misfits, measure_fit
from resilient_jax.step.host_grid import HostGrid
from resilient_jax.step.reducer import Reducer
from resilient_jax.step.reduction import AllReduce, ExactReduce
from resilient_jax.step.running_total import add_to_total, compute_exponents, list_formats, start_total

SHAPES = {"odd": (7, 3), "one": (), "long": (1000,), "large": (40, 50), "empty": (0, 4)}
SLICED = {"sliced large float32": (257, 150), "sliced large bfloat16": (200, 150)}
"""Of arrays that together are so large that each host adds up a slice of them."""
DTYPES = (np.float32, jnp.bfloat16, np.complex64, np.int32)
OWNERS = ((0,), (2,), (0, 1, 2), (2, 0, 2, 1, 1, 2, 2), (1, 1, 1))
"""Of each microbatch, the host that has it."""


def part_of(microbatch: int) -> dict[str, np.ndarray]:
    """Return elements of very different magnitude: floats in any other order would give other bits."""
    random = np.random.default_rng(microbatch)
    sliced = {
        name: random.standard_normal(shape).astype(jnp.bfloat16 if "bfloat16" in name else np.float32)
        for name, shape in SLICED.items()
    }
    return sliced | {
        f"{name} {np.dtype(dtype).name}": (
            random.standard_normal(shape) * 10.0 ** random.integers(-3, 4, shape)
        ).astype(dtype)
        for (name, shape), dtype in itertools.product(SHAPES.items(), DTYPES)
    }


def add_parts(parts: list[np.ndarray]) -> np.ndarray:
    """Return the sum in float64."""
    wide = (
        np.int64
        if parts[0].dtype == np.int32
        else np.complex128
        if parts[0].dtype == np.complex64
        else np.float64
    )
    return np.sum([part.astype(wide) for part in parts], axis=0)


def train(world: rj.World) -> None:
    assert len(world.hosts) == 3
    grid = HostGrid(world.devices, world.host_index)
    whole = NamedSharding(world.local_mesh("data"), P())
    here = jax.local_devices()[0]
    for owners, place, reduction in itertools.product(OWNERS, (whole, here), ("exact", "exact_wide")):
        spec = AccumulationSpec(name="", step=0, num_microbatches=len(owners), reduction=reduction)
        limits = choose_limits(
            np.asarray(compute_exponents(spec, part_of(0))), list_formats(spec, part_of(0)), len(owners)
        )
        like = jax.device_put(part_of(0), place)
        mine = [index for index, owner in enumerate(owners) if owner == world.host_index]
        alone = total_of(spec, range(len(owners)), like, limits)
        found = ExactReduce(grid)(total_of(spec, mine, like, limits), like, limits)
        expected = ExactReduce(HostGrid(world.local_devices, world.host_index))(alone, like, limits)
        for name, leaf in found.items():
            assert leaf.dtype == like[name].dtype, (name, leaf.dtype)
            assert leaf.sharding == like[name].sharding, name
            assert np.asarray(leaf).tobytes() == np.asarray(expected[name]).tobytes(), (owners, name)
            exact = add_parts([part_of(index)[name] for index in range(len(owners))])
            relative = 2.0**-8 if "bfloat16" in name else 2.0**-22
            error = np.abs(np.asarray(leaf).astype(exact.dtype) - exact)
            sizes = sum(np.abs(part_of(index)[name]) for index in range(len(owners)))
            if reduction == "exact" and "large" in name:  # the same for all elements: of the largest
                sizes += np.max(np.abs(part_of(0)[name]))
            assert np.all(error <= relative * sizes), name
    check_resumed(world, jax.device_put(part_of(0), whole))
    cancelling = np.array([3e7, -3e7, 0.5], np.float32)[world.host_index]
    for value in (cancelling, jnp.asarray(cancelling)):
        assert world.all_reduce({"sum": value, "count": np.int32(1)}) == {"sum": 0.5, "count": 3}
    assert world.all_reduce({"python": 0.5, "wide": np.float64(0.25)}) == {"python": 1.5, "wide": 0.75}
    summed = AllReduce(grid)(jax.device_put(part_of(world.host_index), here))
    for name, leaf in summed.items():
        exact = add_parts([part_of(host)[name] for host in range(3)])
        np.testing.assert_allclose(np.asarray(leaf).astype(exact.dtype), exact, rtol=2e-2)


def total_of(
    spec: AccumulationSpec, microbatches: Iterable[int], like: dict[str, jax.Array], limits: np.ndarray
) -> Any:
    """Return the total of these microbatches, placed as `like`."""
    total, fits = start_total(spec, jax.tree.map(jnp.zeros_like, like), limits), []
    for index in microbatches:
        part = {name: jax.device_put(leaf, like[name].sharding) for name, leaf in part_of(index).items()}
        total, exponents = add_to_total(total, part, limits, donate=True)
        fits.append(measure_fit(np.asarray(exponents)[None], limits, list_formats(spec, like)))
    assert not fits or not find_misfits(np.sum(fits, axis=0)).any()
    return total


class Hooks:
    """The `StepHooks` of a step in which nothing happens."""

    def raise_if_ended(self) -> None:
        pass

    def digest_state(self) -> np.ndarray:
        return make_no_state_digest()

    def compare_hosts(self, states: np.ndarray, sample: DataSample, reads: np.ndarray) -> None:
        pass

    def report_misfits(self, name: str, leaves: Sequence[str]) -> None:
        raise AssertionError(leaves)

    def leave_job(self, why: str) -> NoReturn:
        raise AssertionError(why)

    def hit_failpoint(self, failpoint: FailPoint, index: int = -1) -> Corruption:
        return Corruption.NONE


def check_resumed(world: rj.World, like: dict[str, jax.Array]) -> None:
    """A step is resumed in which some hosts have a total, or a microbatch that waits for the limits, or nothing."""
    spec = AccumulationSpec(name="resumed", step=1, num_microbatches=7, reduction="exact")
    first = np.asarray(compute_exponents(spec, part_of(0)))
    limits = choose_limits(first, list_formats(spec, part_of(0)), 7)
    alone = total_of(spec, range(7), like, limits)
    expected = ExactReduce(HostGrid(world.local_devices, world.host_index))(alone, like, limits)
    for cases in (
        {0: ("total", (0, 1)), 1: ("waits", (3,))},
        {0: ("waits", (5,)), 2: ("total", (4, 6))},
        {0: ("waits", (3,)), 1: ("waits", (0,))},
        {1: ("waits", (6,))},
        {},
    ):
        kept = Contributions(spec)
        kind, indexes = cases.get(world.host_index, ("nothing", ()))
        exponents = tuple(compute_exponents(spec, part_of(index)) for index in indexes)
        if kind == "total":
            kept.limits = limits
            kept.parts[0] = Contribution(total_of(spec, indexes, like, limits), frozenset(indexes), exponents)
        elif kind == "waits":
            part = {
                name: jax.device_put(leaf, like[name].sharding) for name, leaf in part_of(*indexes).items()
            }
            kept.parts[0] = Contribution(part, frozenset(indexes), exponents, is_started=False)
        had = {index for _, those in cases.values() for index in those}

        def compute(microbatch: rj.Microbatch, had: set[int] = had) -> dict[str, jax.Array]:
            assert microbatch.index not in had, "computed again"
            where = NamedSharding(microbatch.replica.mesh, P())
            return jax.device_put(part_of(microbatch.index), where)

        reducer = Reducer(lambda: world.devices, ProcessIndex(world.host_index), {spec.name: kept}, Hooks())
        zeros = jax.tree.map(jnp.zeros_like, like)
        found = reducer.accumulate_microbatches(
            spec, compute, zeros, data=None, replica_shape=rj.ReplicaShape()
        )
        for name, leaf in found.items():
            assert np.asarray(leaf).tobytes() == np.asarray(expected[name]).tobytes(), (cases, name)


if __name__ == "__main__":
    rj.run(train)
