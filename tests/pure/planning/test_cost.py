"""The terms of the estimate against values computed by hand (collectives, memory, computing), and calibration files."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError, ConfigError
from resilient_jax.planning.calibration import Calibration, load_calibration
from resilient_jax.planning.collectives import (
    DeviceLink,
    estimate_collective_s,
    estimate_send_s,
    find_device_links,
)
from resilient_jax.planning.device_cost import count_device_work, estimate_compute_s, list_fsdp_collectives
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes, make_layout
from resilient_jax.planning.memory import StagePosition, count_activations, estimate_stage_memory
from resilient_jax.planning.program_cost import CollectiveKind, ModelPart, TensorRole
from resilient_jax.planning.state_bytes import StateCounter
from tests.support.plan_topologies import cluster, small_profile

FAST, SLOW = DeviceLink(bytes_per_s=1e9, latency_s=1e-6), DeviceLink(bytes_per_s=1e8, latency_s=1e-5)
PROFILE = small_profile()


def test_a_ring_sends_all_but_a_devices_own_part():
    assert estimate_collective_s(CollectiveKind.ALL_GATHER, 8e9, (4,), [FAST]) == pytest.approx(6 + 3e-6)
    assert estimate_collective_s(CollectiveKind.REDUCE_SCATTER, 8e9, (4,), [FAST]) == pytest.approx(6 + 3e-6)
    assert estimate_collective_s(CollectiveKind.ALL_REDUCE, 8e9, (4,), [FAST]) == pytest.approx(12 + 6e-6)


def test_an_array_in_pieces_pays_for_the_latency_of_each_piece():
    assert estimate_collective_s(CollectiveKind.ALL_GATHER, 8e9, (4,), [FAST], pieces=5) == pytest.approx(
        6 + 5 * 3e-6
    )


def test_only_each_devices_part_crosses_hosts_and_the_slowest_level_counts():
    # 8e9 bytes: 3/4 of them inside the host at 1e9 bytes/s, 1/2 of the remaining 2e9 outside at 1e8 bytes/s.
    assert estimate_collective_s(CollectiveKind.ALL_GATHER, 8e9, (4, 2), [FAST, SLOW]) == pytest.approx(
        10 + 3e-6 + 1e-5
    )


@given(st.sampled_from(CollectiveKind), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_over_equal_links_the_level_at_which_devices_meet_does_not_matter(kind, inside, rack, racks):
    links = [FAST, free := dataclasses.replace(SLOW, latency_s=0.0), free]
    apart = estimate_collective_s(kind, 8e9, (inside, rack, racks), links)
    assert apart == pytest.approx(estimate_collective_s(kind, 8e9, (inside, 1, rack * racks), links))


def test_many_devices_pay_the_latency_of_a_tree():
    assert estimate_collective_s(CollectiveKind.ALL_GATHER, 0, (1024,), [SLOW]) == pytest.approx(20e-5)


def test_all_to_all_sends_out_of_a_host_only_what_leaves_it():
    # Each of 8 devices has 1e9 bytes, of which one half leaves the host at 1e8 bytes/s.
    assert estimate_collective_s(CollectiveKind.ALL_TO_ALL, 8e9, (4, 2), [FAST, SLOW]) == pytest.approx(
        5, abs=1e-4
    )


def test_one_device_needs_no_collectives():
    assert estimate_collective_s(CollectiveKind.ALL_REDUCE, 8e9, (1, 1), [FAST, SLOW]) == 0
    assert estimate_send_s(8e9, (1, 1), [FAST, SLOW]) == 0


@given(
    st.sampled_from(CollectiveKind),
    st.integers(1, 8),
    st.integers(1, 64),
    st.floats(0, 1e9),
    st.floats(1, 10),
)
def test_a_faster_link_is_never_slower(kind, inside, outside, message, factor):
    faster = dataclasses.replace(SLOW, bytes_per_s=SLOW.bytes_per_s * factor)
    spread = (inside, outside)
    assert estimate_collective_s(kind, message, spread, [FAST, faster]) <= estimate_collective_s(
        kind, message, spread, [FAST, SLOW]
    )


def test_devices_share_the_port_of_their_host():
    topology = cluster([1.0, 1.0], devices=4)
    assert [link.bytes_per_s for link in find_device_links(topology, 0.5)] == [5e8, 5e7]
    assert [link.latency_s for link in find_device_links(topology, 0.5, 3.0)] == pytest.approx([3e-6, 3e-5])


def test_asynchronous_collectives_gather_a_layer_at_once_in_two_passes():
    state = StateCounter(PROFILE).count(ReplicaAxes(fsdp=4)).layer
    assert list_fsdp_collectives(PROFILE, ModelPart.LAYER, state) == (
        (2, CollectiveKind.ALL_GATHER, state.gathered, 1),
        (1, CollectiveKind.REDUCE_SCATTER, state.gathered_gradients, 1),
    )


@pytest.mark.parametrize(("stacked", "passes"), [(None, 1), (0, 2)], ids=["one by one", "a loop"])
def test_blocking_collectives_gather_each_array_of_a_layer_separately(stacked, passes):
    tensors = tuple(dataclasses.replace(tensor, stacked_dim=stacked) for tensor in PROFILE.tensors)
    profile = dataclasses.replace(PROFILE, backend="cpu", tensors=tensors)
    state = StateCounter(profile).count(ReplicaAxes(fsdp=4)).layer
    arrays = sum(
        tensor.role is TensorRole.PARAMETER and ModelPart.LAYER in tensor.parts for tensor in tensors
    )
    assert arrays > 1
    gathers, _ = list_fsdp_collectives(profile, ModelPart.LAYER, state)
    assert gathers == (passes, CollectiveKind.ALL_GATHER, state.gathered, arrays)
    gathers, _ = list_fsdp_collectives(profile, ModelPart.HEAD, state)
    assert gathers.times == 1


def test_computing_is_products_then_memory_then_overhead():
    constants = Calibration(
        matrix_efficiency=0.5, attention_efficiency=0.25, memory_efficiency=0.5, kernel_overhead_s=0.25
    )
    group, batch = ReplicaAxes(tensor=2), MicrobatchConfig(3, True)
    layer = PROFILE.parts[1]
    assert layer.part is ModelPart.LAYER
    state = StateCounter(PROFILE).count(group).layer
    work = count_device_work(PROFILE, layer, state, group, batch)
    passes = layer.forward_flops.scaled(2) + layer.backward_flops
    attention = passes.attention * 3 / 2
    assert attention > 0
    assert work.attention_flops == pytest.approx(attention)
    assert work.flops == pytest.approx(passes.total * 3 / 2 - attention)
    assert work.kernels == 4 * layer.kernels > 4  # forward, recomputed, and twice as many backward
    assert estimate_compute_s(work, 1e10, 1e10, constants) == pytest.approx(
        (work.flops + 4 * work.attention_flops) / 5e9 + work.moved_bytes / 5e9 + 0.25 * work.kernels
    )


def test_a_device_has_its_share_of_the_state():
    whole = (
        StateCounter(PROFILE).count(ReplicaAxes()).count_stage(PROFILE.layers, is_first=True, is_last=True)
    )
    assert whole.parameters == PROFILE.parameter_bytes
    assert whole.gradients == PROFILE.parameter_count * PROFILE.gradient_bytes
    assert whole.optimizer == PROFILE.optimizer_bytes
    cut = (
        StateCounter(PROFILE).count(ReplicaAxes(fsdp=2, tensor=2)).count_stage(3, is_first=True, is_last=True)
    )
    assert PROFILE.parameter_bytes / 4 <= cut.parameters <= PROFILE.parameter_bytes / 3


def test_stages_together_hold_the_state_once_but_for_a_tied_embedding():
    tied = small_profile(tied_embedding=True)
    state = StateCounter(tied).count(ReplicaAxes(pipeline=3))
    stages = [state.count_stage(1, is_first=i == 0, is_last=i == 2) for i in range(3)]
    assert sum(stage.parameters for stage in stages) == tied.parameter_bytes + state.tied.parameters
    assert state.count_stage(3, is_first=True, is_last=True).parameters == tied.parameter_bytes


def test_memory_is_the_sum_of_its_terms_by_chameleons_formula():
    """`l (2 m_p + m_o) + (P - i) l m_a`, with gradients as large as parameters, and the terms that the paper omits."""
    group, batch, constants = ReplicaAxes(pipeline=3), MicrobatchConfig(1, False), Calibration()
    state, kept = StateCounter(PROFILE).count(group), count_activations(PROFILE, group, batch)
    memory = estimate_stage_memory(
        state, kept, constants, StagePosition(2, 1, 4), in_flight=3, has_gathers=False
    )
    layer = state.layer
    assert memory.parameters + memory.gradients + memory.optimizer == 2 * (
        2 * layer.parameters + layer.optimizer
    )
    assert memory.activations == pytest.approx(3 * 2 * kept.layer + kept.extra)
    assert memory.gathers == layer.gathered
    assert memory.total == pytest.approx(sum(getattr(memory, f.name) for f in dataclasses.fields(memory)))


def test_remat_keeps_less_and_computes_more():
    kept, again = (
        count_activations(PROFILE, ReplicaAxes(), MicrobatchConfig(2, flag)) for flag in (False, True)
    )
    assert again.layer < kept.layer
    assert again.extra > kept.extra


def test_a_layout_fills_hosts_from_the_innermost_axis():
    layout = make_layout(ReplicaAxes(tensor=4, fsdp=4, pipeline=3), devices=8, level=1, block=1, outermost=1)
    assert layout.axes_in_host == ReplicaAxes(tensor=4, fsdp=2)
    assert layout.host_slots == 6
    assert make_layout(ReplicaAxes(tensor=2), devices=6, level=1, block=1, outermost=1).replicas_per_slot == 3


def test_constants_are_read_from_their_file_and_the_others_are_as_assumed(tmp_path):
    constants = Calibration(matrix_efficiency=0.61, kernel_overhead_s=1.5e-5)
    (tmp_path / "mine.toml").write_text("matrix_efficiency = 0.61\nkernel_overhead_s = 1.5e-5\n")
    assert load_calibration(tmp_path / "mine.toml") == constants


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "matrix_efficency = 1.0",
            "key 'matrix_efficency': found an unknown key, expected one of matrix_efficiency",
        ),
        ("matrix_efficiency = 1.5", "matrix_efficiency: found 1.5, expected a number > 0 and <= 1"),
        ("kernel_overhead_s = -1", "kernel_overhead_s: found -1.0, expected a number >= 0"),
        ("link_efficiency = 0", "link_efficiency: found 0.0, expected a number > 0"),
        ("link_efficiency = true", "key 'link_efficiency': found True, expected a number"),
        ("link_efficiency", "found no TOML"),
        ("link_efficiency = 1" + "0" * 400, "int too large to convert to float"),
    ],
)
def test_a_wrong_file_of_constants_is_refused_by_file_and_key(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        load_calibration(path)
    assert str(path) in str(error.value)


def test_a_missing_file_of_constants_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="found no file that can be read"):
        load_calibration(tmp_path / "none.toml")


def test_a_constant_that_is_no_number_is_refused():
    with pytest.raises(CallerError, match="step_overhead_s: found nan"):
        Calibration(step_overhead_s=float("nan"))
