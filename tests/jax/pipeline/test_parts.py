"""Parts of the pipeline that need no other process: the log, packing, units of state, rows, what is done again."""

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

from resilient_jax.blocks.cut_model import cut_model
from resilient_jax.errors import MessageError
from resilient_jax.host_exchange.array_packing import pack_arrays, unpack_arrays
from resilient_jax.ids import HostName
from resilient_jax.pipeline.block_state import BlockState
from resilient_jax.pipeline.block_sums import BlockSums
from resilient_jax.pipeline.boundary_log import BoundaryLog
from resilient_jax.pipeline.commit_table import CommitTable, HostRows, SumsDiffer, UnitRow, make_table
from resilient_jax.pipeline.stage_evaluation import MicrobatchResults, sum_results
from resilient_jax.pipeline.stage_runner import StageRunner
from resilient_jax.pipeline.state_units import list_state_units
from resilient_jax.pipeline.step_progress import TaskProgress, drop_late_copies, plan_continuation
from resilient_jax.pipeline.sum_pieces import list_sum_pieces
from resilient_jax.pipeline_schedule.rerouting import Resend
from resilient_jax.pipeline_schedule.routes import Hop, Route, find_holders, make_routes
from resilient_jax.pipeline_schedule.tasks import (
    Boundary,
    BoundaryKind,
    PipelineSchedule,
    Task,
    TaskKind,
)
from resilient_jax.state.array_digest import digest_tree
from resilient_jax.weighted_mean import WEIGHTS
from tests.support.cut_variables import init_units, split_variables
from tests.support.full_only import full_but
from tests.support.small_decoders import KEY, MAKERS, make_batch

A, B, C = map(HostName, "abc")


@pytest.fixture(scope="module", params=full_but(["nnx", "scan"], "scan".__eq__))
def model(request):
    """Return the variables of a decoder, and its cut."""
    decoder = MAKERS[request.param]()
    return decoder.variables, cut_model(decoder.loss, decoder.variables, make_batch(), KEY)


def activation(microbatch, block=1):
    return Boundary(BoundaryKind.ACTIVATION, microbatch, block)


def test_a_log_forgets_the_oldest_values_and_says_which():
    log = BoundaryLog(max_bytes=10)
    for number in range(3):
        log.record(activation(number), memoryview(bytes(4)))
    assert log.forgotten == {activation(0)}
    assert log.get(activation(0)) is None
    assert log.get(activation(2)) is not None
    log.record(activation(0), memoryview(bytes(4)))
    assert log.forgotten == {activation(1)}
    log.clear()
    assert log.forgotten == frozenset()
    assert [log.get(activation(number)) for number in range(3)] == [None] * 3


def test_arrays_of_any_dtype_come_out_of_one_buffer_as_they_went_in():
    arrays = [
        np.arange(5, dtype=np.float32),
        np.asarray(jnp.full((2, 3), 1.5, jnp.bfloat16)),
        np.zeros((0, 4), np.int8),
        np.float32(7),
    ]
    shapes = [jax.ShapeDtypeStruct(np.shape(array), np.asarray(array).dtype) for array in arrays]
    for count in (1, len(arrays)):
        found = unpack_arrays(pack_arrays(arrays[:count]), shapes[:count], "a mail")
        for array, other in zip(arrays, found, strict=False):
            assert np.asarray(array).dtype == other.dtype
            np.testing.assert_array_equal(array, other)
    with pytest.raises(MessageError, match="a mail: found 20 bytes, expected"):
        unpack_arrays(pack_arrays(arrays[:1]), shapes, "a mail")


def test_one_array_is_packed_without_a_copy():
    array = np.zeros(3, np.float32)
    data = pack_arrays([array])
    array[0] = 1
    assert np.frombuffer(data, np.float32)[0] == 1


def test_units_have_every_weight_once_and_shared_ones_are_units_of_their_own(model):
    _, cut = model
    units = list_state_units(cut)
    names = [weight.name for unit in units for weight in unit.weights]
    assert sorted(names) == sorted(weight.name for weight in cut.trace.table.weights)
    last = cut.num_blocks - 1
    assert [unit.blocks for unit in units if len(unit.blocks) > 1] == [(0, last)]
    holders = [{A}, {A}, {B}, {B}, {C}]
    assert next(unit for unit in units if unit.blocks == (0, last)).list_holders(holders) == {A, C}


def test_a_units_values_are_the_same_after_they_were_joined_to_a_tree_and_split(model):
    variables, cut = model
    weights = cut.trace.table.split(variables)
    for unit in list_state_units(cut):
        found = unit.split(unit.join(weights))
        assert found.keys() == set(unit.trained_names)
        for key, value in found.items():
            np.testing.assert_array_equal(value, weights[key])


def make_update_table(divisor=8.0):
    return CommitTable(divisor=divisor, norm=4.0, loss=0.0, results={})


def test_the_update_of_all_units_is_that_of_the_whole_tree(model):
    variables, cut = model
    optimizer = optax.adamw(1e-2, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))
    state = BlockState(list_state_units(cut), optimizer, num_microbatches=8, max_norm=2.0)
    weights = cut.trace.table.split(variables)
    init_units(state, optimizer, weights, A, [{A}] * cut.num_blocks)
    sums = {
        number: {name: 8 * jnp.sin(1 + state.states[number].weights[name]) for name in unit.trained_names}
        for number, unit in enumerate(state.units)
    }
    state.update(sums, make_update_table())
    whole = optimizer.init(variables)
    gradients = jax.tree.map(lambda leaf: jnp.sin(1 + leaf) / 2, variables)
    updates, _ = optimizer.update(gradients, whole, variables)
    expected = cut.trace.table.split(optax.apply_updates(variables, updates))
    for block in range(cut.num_blocks):
        for key, value in state.list_weights(block).items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-6)
            assert not np.array_equal(value, weights[key])


def make_updatable(model, optimizer, *, donate):
    """Return the state of all units, and sums for them."""
    variables, cut = model
    state = BlockState(list_state_units(cut), optimizer, num_microbatches=8, max_norm=2.0, donate=donate)
    weights = jax.tree.map(jnp.copy, cut.trace.table.split(variables))  # of others in this module, too
    init_units(state, optimizer, weights, A, [{A}] * cut.num_blocks)
    sums = {
        number: {name: 8 * jnp.sin(1 + state.states[number].weights[name]) for name in unit.trained_names}
        for number, unit in enumerate(state.units)
    }
    return state, sums


def test_gradients_are_divided_by_the_weight_of_the_step_where_there_is_one(model):
    digests = []
    for scale, divisor in ((1, 8.0), (2, 16.0)):
        # Adam would divide by any scale of the gradients itself.
        state, sums = make_updatable(model, optax.sgd(1e-2), donate=False)
        scaled = jax.tree.map(lambda leaf, scale=scale: scale * leaf, sums)
        state.update(scaled, make_update_table(divisor))
        digests.append([digest_tree(state.list_weights(block)) for block in range(model[1].num_blocks)])
    assert digests[0] == digests[1]


def test_an_update_that_takes_the_memory_of_the_state_has_the_same_bits(model):
    digests = []
    for donate in (False, True):
        state, sums = make_updatable(model, optax.adam(1e-2), donate=donate)
        before = jax.tree.leaves(state.states)
        for _ in range(2):
            state.update(sums, make_update_table())
        assert [leaf.is_deleted() for leaf in before] == [donate] * len(before)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((sums, state.states)))
        digests.append([digest_tree(state.list_weights(block)) for block in range(model[1].num_blocks)])
    assert digests[0] == digests[1]


def test_an_update_that_fails_leaves_all_units_of_one_step_or_none(model):
    for donate in (False, True):
        state, sums = make_updatable(model, optax.adam(1e-2), donate=donate)
        before = [digest_tree(state.list_weights(block)) for block in range(model[1].num_blocks)]
        last = max(state.states)
        missing = {number: found for number, found in sums.items() if number != last}
        with pytest.raises(KeyError):
            state.update(missing, make_update_table())
        if donate:
            assert state.all_states == {}
        else:
            assert [digest_tree(state.list_weights(block)) for block in range(model[1].num_blocks)] == before


def rows(*units, **results):
    return HostRows(
        units=tuple(UnitRow(number, norm, digest) for number, norm, digest in units),
        results=results,
    )


def test_the_norm_does_not_depend_on_which_host_has_which_unit():
    one = (0, 1e8, b"x"), (1, 1.0, b"y"), (2, 1.0, b"z")
    tables = [
        make_table({A: rows(*one, loss=3.0)}, 1),
        make_table({A: rows(one[2], one[0]), B: rows(one[1], one[0], loss=3.0)}, 1),
    ]
    assert tables[0] == tables[1]
    assert tables[0].loss == 3.0
    # Next to the first unit each of the others is too small to be added alone; together they are not.
    large, *small = units = [(0, 2.0**30, b"x"), *((number, 60.0, b"y") for number in range(1, 9))]
    norms = [make_table(found, 1).norm for found in ({A: rows(*units)}, {A: rows(*small), B: rows(large)})]
    assert norms[0] == norms[1]


def test_means_are_divided_once_by_what_they_are_means_of():
    summed = {"loss": 6.0, f"{WEIGHTS}/loss": 12.0, "spread": 8.0, "right": 3.0}
    table = make_table({A: rows((0, 9.0, b"x"), **summed), B: rows(**{f"{WEIGHTS}/right": 4.0})}, 8)
    assert table.results == {"loss": 0.5, "spread": 1.0, "right": 0.75}
    # The rows have the norm of sums / 8, which are to be divided by 12.
    assert (table.loss, table.divisor, table.norm) == (0.5, 12.0, 2.0)
    unweighted = make_table({A: rows((0, 9.0, b"x"), loss=6.0)}, 8)
    assert (unweighted.loss, unweighted.divisor, unweighted.norm) == (0.75, 8.0, 3.0)


@pytest.mark.parametrize(
    ("weight", "divisor", "mean"),
    [(0.0, np.inf, 0.0), (np.nan, np.nan, np.nan), (np.inf, np.nan, np.nan), (-1.0, np.nan, np.nan)],
)
def test_what_no_weight_divides_is_zero_and_what_is_no_weight_makes_nan(weight, divisor, mean):
    table = make_table({A: rows((0, 9.0, b"x"), **{"loss": 6.0, f"{WEIGHTS}/loss": weight})}, 8)
    np.testing.assert_equal((table.divisor, table.norm, table.loss), (divisor, mean, mean))


def test_holders_with_different_sums_are_refused_by_name():
    with pytest.raises(SumsDiffer, match="unit 1: found sums 78 on a and 79 on b"):
        make_table({A: rows((1, 2.0, b"x")), B: rows((1, 2.0, b"y"))}, 1)
    with pytest.raises(
        SumsDiffer, match=r"total weights/loss: found a sum of 3\.0 on b and of 2\.0 on another"
    ):
        make_table({A: rows(**{f"{WEIGHTS}/loss": 2.0}), B: rows(**{f"{WEIGHTS}/loss": 3.0})}, 1)
    make_table({A: rows(loss=np.nan), B: rows(loss=np.nan)}, 1)


TEAMS = [[(A, 1), (B, 2)], [(C, 3)]]
SCHEDULE = PipelineSchedule.ZERO_BUBBLE
FORWARD, INPUT, WEIGHT = TaskKind.FORWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT


def make_progress(done, forgotten=(), dead=(B,)):
    """What each living host says: its own tasks, all of one routing."""
    holders = find_holders(TEAMS)
    return {
        host: TaskProgress(
            step=0,
            table=None,
            units_here=(),
            units_after=(),
            blocks=tuple(block for block, having in enumerate(holders) if host in having),
            routed_in=1,
            routes=make_routes(TEAMS, [1, 0]),
            done=tuple(task for task in done if task.hop.host == host),
            forgotten=tuple(forgotten),
        )
        for host in (A, B, C)
        if host not in dead
    }


def plan(done, forgotten, dead=(B,)):
    return plan_continuation(make_progress(done, forgotten, dead), 3, SCHEDULE)


def test_a_value_that_no_finished_task_has_used_is_sent_again():
    first = Task(FORWARD, 0, Hop(A, 0, 1))
    assert plan([first], []).resends == (Resend(activation(0), A, C),)
    used = Task(FORWARD, 0, Hop(B, 1, 3))
    assert plan([first, used], [], dead=()).resends == ()
    gradient = Boundary(BoundaryKind.GRADIENT, 0, 1)
    done = [first, used, Task(INPUT, 0, Hop(B, 1, 3))]
    assert plan(done, [], dead=()).resends == (Resend(gradient, B, A),)


def test_a_value_that_was_forgotten_is_computed_again_and_nothing_else():
    hop = Hop(A, 0, 1)
    done = [Task(kind, 0, hop) for kind in (FORWARD, INPUT, WEIGHT)]
    found = plan(done, [activation(0)])
    assert found.redone == {Task(FORWARD, 0, hop)}
    assert found.done == frozenset(), "orders have the whole hop; the host skips what it has"
    assert found.resends == ()


def test_a_gradient_that_was_forgotten_needs_the_forward_pass_again():
    hop = Hop(B, 1, 3)
    done = [Task(FORWARD, 0, Hop(A, 0, 1)), Task(FORWARD, 0, hop), Task(INPUT, 0, hop), Task(WEIGHT, 0, hop)]
    found = plan(done, [Boundary(BoundaryKind.GRADIENT, 0, 1)], dead=())
    assert found.redone == {Task(FORWARD, 0, hop), Task(INPUT, 0, hop)}
    assert found.resends == (Resend(activation(0), A, B),)


def test_a_host_that_was_started_again_does_again_what_it_had_done():
    done = [Task(FORWARD, 0, Hop(A, 0, 1)), Task(FORWARD, 0, Hop(B, 1, 3))]
    progress = make_progress(done, dead=())
    progress[B] = TaskProgress(step=0, table=None, units_here=(1, 2), units_after=(1, 2), blocks=(1, 2))
    found = plan_continuation(progress, 3, SCHEDULE)
    assert found.done == {done[0]}
    assert [resend.boundary for resend in found.resends] == [activation(0)]
    assert found.routes[0].hops[0] == Hop(A, 0, 1)


def test_copies_of_an_earlier_step_are_nothing_that_a_host_has():
    progress = {
        host: TaskProgress(
            step=step, table=None, units_here=(0,), units_after=(0,), blocks=(0,), has_copies=copies
        )
        for host, step, copies in ((A, 2, False), (B, 1, True), (C, 2, True))
    }
    found = drop_late_copies(progress, 2)
    assert {host: one.units_here for host, one in found.items()} == {A: (0,), B: (), C: (0,)}
    assert {one.step for one in found.values()} == {2}


def test_what_was_done_by_older_routes_does_not_count():
    done = [Task(FORWARD, 0, Hop(A, 0, 1)), Task(FORWARD, 0, Hop(B, 1, 3))]
    progress = make_progress(done, dead=())
    progress[A] = msgspec.structs.replace(progress[A], routed_in=2)
    found = plan_continuation(progress, 3, SCHEDULE)
    assert found.done == {done[0]}, "what B did, another did again while it was away"


class Sink:
    """Counts what it gets."""

    def __init__(self):
        self.got = []

    def has(self, block, microbatch):
        return (block, microbatch) in self.got

    def add(self, block, microbatch, gradients, results):
        self.got.append((block, microbatch))


def test_a_backward_pass_that_is_run_again_adds_no_gradient_a_second_time(model):
    variables, cut = model
    hop = Hop(A, 0, cut.num_blocks)
    order = [Task(kind, 0, hop) for kind in (FORWARD, TaskKind.BACKWARD)]
    sink, ran, weights = Sink(), [], dict(enumerate(split_variables(cut, variables)))
    runner = StageRunner(A, cut, BoundaryLog(0), sink)
    mail: Any = None  # one hop has all blocks: nothing is sent
    routes = {0: Route(0, (hop,))}
    for _ in range(2):
        runner.run(order, routes, mail, weights, lambda microbatch: (make_batch(), KEY), ran.append)
        runner.forget(frozenset(order))
    assert ran == 2 * order
    assert sorted(sink.got) == [(block, 0) for block in range(cut.num_blocks)]


class OneHost:
    """The layout of the sums of a single host, and its mail."""

    def pack(self, arrays):
        return pack_arrays(arrays)

    def make_key(self, *key):
        return key

    def list_receivers(self, piece):
        return {A}

    def list_first_microbatches(self, block):
        return {A: 0}


@pytest.mark.parametrize("first", [0.0, 1e-30, 1.0])
def test_a_block_is_summed_whatever_its_gradients_are_in_microbatch_0(first):
    """A masked batch, a layer that is dropped, a spike: no limit follows from any of them."""
    cut = cut_model((decoder := MAKERS["nnx"]()).loss, decoder.variables, make_batch(), KEY)
    pieces = [piece for piece in list_sum_pieces(cut, list_state_units(cut)) if piece.block == 1]
    pieces = [dataclasses.replace(piece, number=number) for number, piece in enumerate(pieces)]
    values = np.array([first, 3e-7, 1e4, 2e-3], np.float32)
    sums = BlockSums(A, pieces, len(values))
    for microbatch, value in enumerate(values):
        gradients = {
            name: jnp.full(shape.shape, value, shape.dtype)
            for piece in pieces
            for name, shape in piece.shapes.gradients.items()
        }
        results = {name: jnp.zeros(()) for piece in pieces for name in piece.shapes.results}
        sums.add(1, microbatch, gradients, results)
    host = cast("Any", OneHost())
    found = sums.finish(host, host)
    expected = np.float32(math.fsum(values.astype(np.float64)))
    for _, values in found.pieces:
        for value in values.gradients.values():
            np.testing.assert_allclose(np.asarray(value), expected, rtol=2.0**-22)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_the_results_of_an_evaluation_are_added_up_in_any_order_with_one_rounding(order):
    tiny, huge, inf = 2.0**-24, 1.0, np.inf
    addends = [huge, *[tiny] * 3, -huge][order]
    found = [
        MicrobatchResults(number, {"loss": value, "bad": (inf, -inf)[number % 2]})
        for number, value in enumerate(addends)
    ]
    sums = sum_results(found)
    assert sums["loss"] == np.float32(3 * tiny)
    assert np.isnan(sums["bad"])
