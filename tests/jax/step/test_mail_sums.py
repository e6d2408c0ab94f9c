"""Sums over hosts by mail: with the bits of a collective, whatever is added up."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.ids import ProcessIndex
from resilient_jax.jax_runtime.failures import ServiceEnded
from resilient_jax.step.host_grid import HostGrid
from resilient_jax.step.reduction import ExactReduce
from resilient_jax.step.running_total import merge_totals, start_total_of_hosts
from resilient_jax.worker.mail_sums import MailSums
from tests.support.summing_hosts import SummingHosts


def add_up(trees):
    """Return what the first of some hosts finds, each of which gives a tree."""

    def call(exchange):
        sums = MailSums(jax.local_devices(), ProcessIndex(0))
        sums.exchange = exchange
        return sums.add_up(trees[exchange.host_index])

    return SummingHosts(len(trees)).run(call)[0]


def test_whole_numbers_are_added_up_and_stay_in_host_memory():
    found = add_up(
        [
            {"rows": np.arange(6, dtype=np.int32).reshape(2, 3) * host, "one": np.array([1])}
            for host in (1, 2, 3)
        ]
    )
    assert isinstance(found["rows"], np.ndarray)
    assert found["rows"].tolist() == [[0, 6, 12], [18, 24, 30]]
    assert found["rows"].dtype == np.int32
    assert found["one"].tolist() == [3]
    assert found["one"].dtype == np.int32, "as a collective has it, without 64 bits"


def test_floats_are_added_up_exactly_in_any_order():
    values = [np.float32(1e8), np.float32(1.25), np.float32(-1e8)]
    trees = [{"loss": np.array([value]), "count": np.array([1], np.int32)} for value in values]
    expected = float(sum(Fraction(float(value)) for value in values))
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        found = add_up([trees[host] for host in order])
        assert (float(found["loss"][0]), int(found["count"][0])) == (expected, 3)


def test_arrays_on_devices_have_the_bits_and_the_sharding_that_a_collective_gives():
    here = jax.device_put(np.linspace(-3, 7, 64, dtype=np.float32), jax.local_devices()[0])
    trees = [here, here * 3e-3, here * 1e5]
    (found,) = [add_up(trees)]
    total = merge_totals([start_total_of_hosts(tree) for tree in trees])
    expected = ExactReduce(HostGrid(jax.local_devices(), 0))(total, here)
    assert found.sharding == here.sharding
    assert jnp.array_equal(found, expected)


def test_without_the_addresses_of_hosts_nothing_is_added_up():
    with pytest.raises(ServiceEnded, match="coordination service has ended"):
        MailSums(jax.local_devices(), ProcessIndex(0)).add_up(np.array([1]))
