"""Stages of a pipeline whose hosts have unequal numbers of devices: their axes, and the bits that all agree on."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from resilient_jax.blocks.cut_model import cut_model
from resilient_jax.errors import CallerError
from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.ids import HostName
from resilient_jax.pipeline.block_state import BlockState, UnitState, place_sums, place_unit
from resilient_jax.pipeline.commit_table import CommitTable, HostRows, SumsDiffer, UnitRow, make_table
from resilient_jax.pipeline.state_units import list_state_units
from resilient_jax.pipeline_schedule.teams import find_device_speeds, make_teams, share_microbatches
from resilient_jax.policy.devices_after_loss import DeviceChoice
from resilient_jax.sharding.holder_sharding import (
    find_holders_of,
    make_holder_array,
    make_holder_mesh,
    read_holder_array,
)
from resilient_jax.sharding.stage_sharding import (
    EXAMPLE_AXES,
    STAGE_AXES,
    StageSharding,
    make_abstract_stage_mesh,
    make_stage_mesh,
)
from resilient_jax.state.array_digest import digest_tree
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.state_partition import partition_state
from resilient_jax.step.assignment import ReplicaShape
from resilient_jax.trainer.arranger import Arranger
from resilient_jax.trainer.fit_config import Parallelism
from resilient_jax.trainer.pipeline_options import Pipeline
from resilient_jax.trainer.stage_axes import (
    FewerDevices,
    StageAxes,
    explain_equal_axes,
    fit_stage_axes,
    make_replica_axes,
    reduce_stage_axes,
)
from resilient_jax.trainer.trainer import Trainer
from resilient_jax.trainer.unit_placement import list_used_devices
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.small_decoders import KEY, MAKERS, make_batch
from tests.support.standalone_world import make_world

A, B, C = map(HostName, "abc")
SIZES = st.sampled_from([1, 2, 3, 4])


def fit(axis_sizes, num_devices, *, num_examples=8, can_reduce=True) -> StageAxes:
    options = Pipeline(num_stages=2, axis_sizes=axis_sizes)
    return fit_stage_axes(options, num_devices, A, num_examples=num_examples, can_reduce=can_reduce)


def list_sizes(axes: StageAxes) -> dict[str, int]:
    return {axis: size for axis, size in axes.sizes.items() if size > 1}


def make_arranger() -> Arranger:
    """Return the arranger of a job that is to have tensor 16 on each host; this one has 8 devices."""
    trainer = Trainer(
        model=lambda key: {"w": jnp.zeros((4, 4))},
        optimizer=optax.adam(1e-3),
        loss_fn=lambda params, batch: jnp.mean(batch @ params["w"]),
        data={"x": np.zeros((8, 4), np.float32)},
        batch_size=8,
        microbatch_size=8,
        parallelism=Parallelism(pipeline=Pipeline(num_stages=1, axis_sizes={"tensor": 16})),
    )
    return Arranger(trainer._config)


def test_a_job_whose_state_is_lost_goes_on_though_all_hosts_have_lost_devices():
    """Nothing is committed then, as in the first generation; but that axes fit no host is no error of the user's."""
    axes = make_arranger().fit_own_axes(make_world(generation=2))
    assert (list_sizes(axes), axes.may_replicate) == ({"tensor": 8}, True)


def test_axes_that_fit_no_host_are_refused_when_the_job_begins():
    with pytest.raises(CallerError, match="8 devices on a"):
        make_arranger().fit_own_axes(make_world(generation=1))


@given(
    given=st.fixed_dictionaries(dict.fromkeys(STAGE_AXES, SIZES)),
    num_devices=st.integers(1, 32),
    num_examples=st.sampled_from([1, 2, 6, 8, 12]),
)
def test_a_host_with_fewer_devices_uses_as_many_of_them_as_axes_allow(given, num_devices, num_examples):
    found = reduce_stage_axes(given, num_devices, num_examples)
    used, shares = math.prod(found.values()), math.prod(found[axis] for axis in EXAMPLE_AXES)
    assert used <= num_devices
    assert num_examples % shares == 0
    assert given["tensor"] % found["tensor"] == given["expert"] % found["expert"] == 0
    for more in range(used + 1, num_devices + 1):
        for tensor in (size for size in range(1, 5) if given["tensor"] % size == 0):
            for expert in (size for size in range(1, 5) if given["expert"] % size == 0):
                is_fitting = more % (tensor * expert) == 0
                assert not is_fitting or num_examples % (more // tensor // expert), "more could work"


def test_a_host_with_enough_devices_has_the_axes_of_the_job():
    for can_reduce in (False, True):
        assert list_sizes(fit({"tensor": 2, "fsdp": 2}, 4, can_reduce=can_reduce)) == {"tensor": 2, "fsdp": 2}
        assert list_sizes(fit({"tensor": 2}, 4, can_reduce=can_reduce)) == {"tensor": 2, "fsdp": 2}


def test_a_host_that_lost_a_device_has_fewer_shares_or_a_narrower_tensor_group():
    assert list_sizes(fit({"fsdp": 2}, 1)) == {}
    assert list_sizes(fit({}, 3)) == {"fsdp": 2}, "three do not divide eight examples"
    assert list_sizes(fit({}, 3, num_examples=12)) == {"fsdp": 3}
    assert list_sizes(fit({"tensor": 4}, 3)) == {"tensor": 2}
    assert list_sizes(fit({"tensor": 4}, 3, num_examples=12)) == {"fsdp": 3}
    assert list_sizes(fit({"data": 4, "fsdp": 1}, 2)) == {"data": 2}


def test_axes_that_no_host_has_the_devices_for_are_refused_with_both_numbers():
    with pytest.raises(CallerError, match=r"found axis_sizes={'tensor': 4} and 2 devices on a"):
        fit({"tensor": 4}, 2, can_reduce=False)


def test_hosts_may_have_other_axes_on_cpu_unless_the_update_depends_on_them():
    assert explain_equal_axes(Pipeline(num_stages=2), "") == ""
    assert "computes dot_general" in explain_equal_axes(
        Pipeline(num_stages=2), "the update computes dot_general"
    )
    assert "axes_by_host=True" in explain_equal_axes(Pipeline(num_stages=2, axes_by_host=False), "")


# The same bits.


def make_stage(devices, spec) -> StageSharding:
    """Return a stage with fsdp over these devices, which shards all weights alike that it divides."""
    mesh = make_stage_mesh(make_abstract_stage_mesh({"fsdp": len(devices)}, devices), devices)
    return StageSharding(mesh=mesh, weight_specs=spec, num_examples=4)


@pytest.fixture(scope="module")
def decoder(eight_devices):  # noqa: F811 - that fixture
    made = MAKERS["nnx"]()
    return made.variables, cut_model(made.loss, made.variables, make_batch(), KEY)


def update_on(decoder, devices):
    """Return the digests of all blocks after two updates on these devices."""
    optimizer = optax.adamw(1e-2)
    variables, cut = decoder
    weights = cut.trace.table.split(variables)
    specs = {
        name: P("fsdp") for name, leaf in weights.items() if leaf.ndim and leaf.shape[0] % len(devices) == 0
    }
    sharding = make_stage(devices, specs)
    abstract = sharding.with_mesh(sharding.mesh.abstract_mesh) if len(devices) > 1 else None
    units = list_state_units(cut)
    state = BlockState(units, optimizer, abstract, num_microbatches=7, max_norm=1.7)
    sums = {}
    for number, unit in enumerate(units):
        own = {weight.name: np.asarray(weights[weight.name]) for weight in unit.weights}
        made = UnitState(own, optimizer.init(unit.join(jax.tree.map(jnp.asarray, own))))
        state.states[number] = place_unit(unit, made, sharding)
        found = {name: np.sin(1e4 * own[name]).astype(np.float32) for name in unit.trained_names}
        sums[number] = place_sums(unit, found, sharding)
    for _ in range(2):
        state.update(sums, CommitTable(divisor=7.0, norm=3.0, loss=0.0, results={}))
    return [digest_tree(state.list_weights(block)) for block in range(cut.num_blocks)]


def test_an_update_has_the_same_bits_on_any_number_of_devices(decoder):
    found = [update_on(decoder, jax.devices()[:count]) for count in (1, 2, 3)]
    assert found[0] == found[1] == found[2]


def make_rows(*units, axes):
    return HostRows(
        units=tuple(UnitRow(number, norm, digest) for number, norm, digest in units),
        results={},
        axes=axes,
    )


def test_norms_are_compared_among_hosts_with_the_same_axes_and_sums_among_all():
    wide, narrow = (2,), (1,)
    found = make_table(
        {A: make_rows((0, 4.0, b"x"), axes=wide), B: make_rows((0, 4.1, b"x"), axes=narrow)}, 1
    )
    assert found.norm == 2.0, "that of the first host, on all of them"
    with pytest.raises(SumsDiffer):
        make_table({A: make_rows((0, 4.0, b"x"), axes=wide), B: make_rows((0, 4.1, b"x"), axes=wide)}, 1)
    with pytest.raises(SumsDiffer):
        make_table({A: make_rows((0, 4.0, b"x"), axes=wide), B: make_rows((0, 4.0, b"y"), axes=narrow)}, 1)


# The state over hosts.


def make_views(devices, holders):
    """Return an array that some of three hosts with 2, 1 and 3 devices have, as each of them sees it."""
    value, found = np.arange(24, dtype=np.float32).reshape(12, 2), {}
    for host, local in {A: devices[:2], B: devices[2:3], C: devices[3:6]}.items():
        if host in holders:
            stage = make_stage(local, {})
            assert isinstance(stage.mesh, Mesh)
            array = jax.device_put(value, stage.place(P("fsdp")))
            found[host] = make_holder_array(array, make_holder_mesh(holders, host, stage.mesh), P("fsdp"))
            np.testing.assert_array_equal(np.asarray(read_holder_array(found[host], stage.mesh)), value)
    return found


def test_all_hosts_see_who_has_an_array_whatever_their_devices_are(eight_devices):  # noqa: F811 - that fixture
    views = make_views(eight_devices, (A, C))
    for host in (A, C):
        holders = find_holders_of(views[host].sharding)
        assert holders is not None
        assert (holders.host, holders.hosts) == (host, (A, C))
    found = [
        partition_state(flatten_state(0, {"x": views[host]}).leaves, lambda device: B, [A, B, C])
        for host in (A, C)
    ]
    assert found[0] == found[1], "every host computes the same parts"
    rows = {host: [(part.start[0], part.stop[0]) for part in found[0].slices[host]] for host in (A, B, C)}
    assert rows == {A: [(0, 6)], B: [], C: [(6, 12)]}
    assert find_holders_of(jax.device_put(np.zeros(2), eight_devices[0]).sharding) is None


# Prices.


def test_a_host_with_half_the_devices_gets_half_the_blocks_and_its_replica_fewer_microbatches():
    speeds = find_device_speeds({A: 4, B: 2, C: 4})
    assert speeds == {B: 0.5}
    assert make_teams([A, B, C], [1.0] * 10, 3, speeds) == [[(A, 4), (B, 2), (C, 4)]]
    assert share_microbatches([[(A, 10)], [(B, 10)]], 6, speeds=speeds) == (4, 2)


def test_a_host_counts_the_devices_that_its_axes_use():
    """Of seven devices 4 compute where 7 divides no microbatch; its share of layers and microbatches follows."""
    found = {count: make_replica_axes(fit({"fsdp": 8}, count).sizes) for count in (8, 7)}
    shape = ReplicaShape(per_host="devices", axes_by_devices=tuple(sorted(found.items())))
    devices = [(host, number) for host, count in ((A, 8), (B, 7)) for number in range(count)]
    world: Any = SimpleNamespace(hosts=(A, B), devices=devices, host_of_device=lambda device: device[0])
    used = list_used_devices(world, shape)
    assert used == {A: devices[:8], B: devices[8:12]}


@pytest.mark.parametrize(
    ("num_examples", "why_equal", "expected"),
    [(12, "", (0, 1, 2)), (8, "", (0, 1)), (12, "the optimizer is Muon", "Muon"), (1, "", (0,))],
)
def test_without_a_slow_device_a_host_uses_those_that_its_axes_can(
    num_examples: int, why_equal: str, expected
):
    speeds = ((0, 1.0), (1, 1.0), (2, 1.0), (3, 0.2))
    found = Finding(
        host=A,
        kind=FindingKind.COMPUTE,
        factor=5.0,
        since_step=5,
        evidence="",
        slow_devices=(3,),
        device_speeds=speeds,
    )
    fewer = FewerDevices({"data": 4, "expert": 1, "tensor": 1}, num_examples, why_equal)
    choice = fewer.leave_out("all", found)
    if why_equal:
        assert isinstance(choice, str)
        assert expected in choice
        return
    assert isinstance(choice, DeviceChoice)
    assert (choice.out, choice.used, choice.speed) == ((3,), expected, len(expected) / 4)
