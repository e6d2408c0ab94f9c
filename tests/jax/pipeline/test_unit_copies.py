"""Copies of units for a worker that joins: the bits of the original after each step, and no harm from whoever dies."""

import contextlib
import functools
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import resilient_jax as rj
from resilient_jax.blocks.cut_model import cut_model
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.pipeline import unit_copies
from resilient_jax.pipeline.block_state import BlockState
from resilient_jax.pipeline.commit_table import CommitTable
from resilient_jax.pipeline.copy_requests import COPIES_WANTED_MAIL, COPY_MAIL, COPY_SUMS_MAIL
from resilient_jax.pipeline.planned_copies import PlannedCopies
from resilient_jax.pipeline.state_units import list_state_units
from resilient_jax.pipeline.unit_copies import CommittedStep, UnitCopies
from resilient_jax.pipeline.unit_exchange import UnitMove, plan_moves
from resilient_jax.protocol.state_records import NextMembers
from resilient_jax.sharding.stage_sharding import make_single_device_stage
from resilient_jax.trainer.accumulation import make_abstract
from resilient_jax.trainer.block_prefetch import BlockPrefetch, _prepare, drop_old_mail
from resilient_jax.trainer.pipelined_loss import cut_training_loss, make_pipeline_config
from resilient_jax.trainer.train_step import TrainStep
from resilient_jax.trainer.unit_states import UnitStates
from resilient_jax.transport import Credentials
from resilient_jax.transport.mail_protocol import Mail, MailKey
from resilient_jax.transport.mail_service import MailService
from resilient_jax.transport.mailbox import Mailbox
from resilient_jax.worker.worker_protocol import HeldPause
from tests.support.cut_variables import init_units
from tests.support.patience import Deadline, patience
from tests.support.small_decoders import KEY, MAKERS, make_batch

MEMBER, JOINER = HostName("a"), HostName("d")
GENERATION, MICROBATCHES, MAX_NORM = 3, 4, 0.5
WAIT_S = patience(6)
PACKING_S = 0.5
"""Longer than two updates take."""


class Host:
    """A host with a state and copies."""

    def __init__(self, name, parts):
        self.name, self.step = name, 0
        self.service = MailService(name, "127.0.0.1", Credentials("token"), lambda peer, error: None)
        self.changed = parts.changed
        self.state = BlockState(
            parts.units,
            parts.optimizer,
            None,
            parts.reduce_variable,
            num_microbatches=MICROBATCHES,
            max_norm=MAX_NORM,
            donate=True,
        )
        self.state.replace(jax.tree.map(jnp.copy, parts.states))  # of the other host, too
        states = [self.state.states[number] for number in range(len(parts.units))]
        shapes = self.shapes = jax.eval_shape(lambda: states)
        self.hosts = [name]
        self.copies = UnitCopies(
            name,
            GENERATION,
            self.service,
            self.state,
            shapes,
            make_single_device_stage(),
            parts.changed,
        )

    def train(self):
        """Commit a step with made-up sums of gradients."""
        draw = np.random.default_rng(self.step)
        sums = {
            number: {
                weight.name: jnp.asarray(draw.standard_normal(weight.shape), np.float32)
                for weight in self.state.units[number].weights
                if weight.is_trained or weight.name in self.changed
            }
            for number in self.state.states
        }
        norm, loss, divisor = draw.random(3, np.float32)
        self.copies.wait_until_packed()
        table = CommitTable(divisor=float(divisor), norm=float(norm), loss=float(loss), results={})
        self.state.update(sums, table)
        self.step += 1
        committed = CommittedStep(step=self.step, table=table, sums=sums)
        self.copies.pass_commit(committed, self.hosts, [{MEMBER}] * len(self.state.units))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.BatchNorm(use_running_average=False)(nn.Dense(6)(x))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for number in range(2):
            x = Layer(name=f"layer_{number}")(x)
        return x


class Parts:
    """What a host is made of: a small decoder."""

    optimizer, reduce_variable = optax.adamw(1e-2), None

    def __init__(self):
        decoder = MAKERS["nnx"]()
        cut = cut_model(decoder.loss, decoder.variables, make_batch(), KEY)
        weights = cut.trace.table.split(decoder.variables)
        self.units = list_state_units(cut)
        self.changed = {}
        whole = BlockState(self.units, self.optimizer, num_microbatches=MICROBATCHES)
        init_units(whole, self.optimizer, weights, MEMBER, [{MEMBER}] * len(self.units))
        self.states = whole.states


class PartsWithStatistics(Parts):
    """A model whose layers have batch statistics, which the loss changes."""

    def __init__(self):
        trainer = rj.Trainer(
            model=Net(),
            optimizer=optax.adamw(1e-2),
            loss_fn=lambda model, batch: jnp.mean(model(batch) ** 2),
            data=lambda step, index: np.ones((4, 6), np.float32),
            batch_size=4,
            microbatch_size=4,
            parallelism=rj.Parallelism(pipeline=rj.Pipeline(num_stages=2)),
        )
        config = trainer._config
        programs = TrainStep(config.recipe, make_abstract(config.data.batch(0, 0)))
        cut, _ = cut_training_loss(config, programs, {}, jax.local_devices()[:1])
        pipeline, abstract = make_pipeline_config(config, programs, cut), programs.abstract_state
        self.units = list_state_units(cut, pipeline.params)
        self.optimizer, self.reduce_variable = config.recipe.optimizer, pipeline.reduce_variable
        self.changed = {name: shape for name, (_, shape) in cut.changed_variables.items()}
        assert self.changed
        units = UnitStates(self.units, self.optimizer, abstract.variables, abstract.opt_state)
        variables = programs.init().variables
        self.states = {number: units.init_unit(number, variables) for number in range(len(self.units))}


make_parts = functools.cache(lambda kind: kind())
"""Hosts have copies of the states, and change nothing else."""


def wait_for_mail(host):
    """Wait until the first mail has come: it says what copies are sent, and without it a host looks for none."""
    deadline = Deadline(WAIT_S)
    while not host.service.box._mail:
        assert deadline.find_rest_s() > 0
        host.service.box.wait_for_more(WAIT_S)


@pytest.fixture
def make_host(request):
    parts = make_parts(getattr(request, "param", Parts))
    with contextlib.ExitStack() as stack:

        def make(name):
            host = Host(name, parts)
            stack.callback(host.service.close)
            stack.callback(host.copies.drop)
            return host

        yield make


@pytest.fixture
def pair(make_host):
    """A member that trains, and a host that joins; its own state is of no step."""
    member, joiner = make_host(MEMBER), make_host(JOINER)
    member.service.enter(GENERATION, {MEMBER: member.service.address})
    member.train()
    ask(joiner, member)
    return member, joiner


def ask(joiner, member):
    """Ask the member, and have it train until it has begun to send."""
    everything = range(len(joiner.state.units))
    joiner.copies.request({MEMBER: member.service.address}, {MEMBER: everything, JOINER: everything})
    deadline = Deadline(WAIT_S)
    before = member.copies._request
    while member.copies._request is before or not member.copies.has_begun:
        assert deadline.find_rest_s() > 0
        member.train()


def test_an_update_waits_for_the_units_that_are_being_packed_whose_arrays_it_deletes(make_host):
    member, joiner = make_host(MEMBER), make_host(JOINER)
    member.service.enter(GENERATION, {MEMBER: member.service.address})
    send, may_send, packer = member.service.send, threading.Event(), "rj-copies-"

    def send_late(to, mail):
        if threading.current_thread().name.startswith(packer):
            assert may_send.wait(WAIT_S)
        send(to, mail)

    vars(member.service)["send"] = send_late
    ask(joiner, member)
    release = threading.Timer(PACKING_S, may_send.set)
    release.start()
    try:
        for _ in range(2):
            member.train()
        assert joiner.copies.wait([MEMBER], lambda: None)
    finally:
        may_send.set()
        release.join()
    found = joiner.copies.finish(member.step, lambda: None)
    assert list_bits(found) == list_bits(member.state.states)


def list_bits(states):
    return {
        number: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
        for number, state in states.items()
    }


@pytest.mark.parametrize("make_host", [Parts, PartsWithStatistics], indirect=True)
@pytest.mark.parametrize("steps_after", [0, 3])
def test_a_copy_has_the_bits_of_the_original_after_every_step(pair, steps_after):
    member, joiner = pair
    assert joiner.copies.wait([MEMBER], lambda: None)
    for _ in range(steps_after):
        member.train()
    found = joiner.copies.finish(member.step, lambda: None)
    assert list_bits(found) == list_bits(member.state.states)


def test_copies_that_lack_the_sums_of_a_step_are_not_taken(pair):
    member, joiner = pair
    assert joiner.copies.wait([MEMBER], lambda: None)
    member.copies.stop()
    member.train()
    assert joiner.copies.finish(member.step, lambda: None) == {}


def test_a_member_trains_on_when_the_worker_dies_and_serves_the_next_of_that_host(pair, make_host):
    member, joiner = pair
    joiner.service.close()
    deadline = Deadline(WAIT_S)
    while member.copies.has_begun:  # until it sees that nobody is there
        assert deadline.find_rest_s() > 0
        member.train()
    second = make_host(JOINER)
    ask(second, member)
    assert second.copies.wait([MEMBER], lambda: None)
    member.train()
    assert list_bits(second.copies.finish(member.step, lambda: None)) == list_bits(member.state.states)


def test_a_worker_that_is_not_of_the_next_generation_is_told_to_wait_no_more(pair, make_host):
    member, _ = pair
    third = make_host(HostName("e"))
    everything = range(len(third.state.units))
    wanted = {MEMBER: everything, third.name: everything}
    third.copies.request({MEMBER: member.service.address}, wanted)
    deadline = Deadline(WAIT_S)
    while member.copies._request is None or member.copies._request.host != third.name:
        assert deadline.find_rest_s() > 0
        member.train()
    member.copies.leave([MEMBER, JOINER])
    assert not third.copies.wait([MEMBER, HostName("nobody")], lambda: None)


def test_a_second_request_of_a_worker_is_served_as_the_first(pair):
    member, joiner = pair
    assert joiner.copies.wait([MEMBER], lambda: None)
    joiner.copies.drop()
    ask(joiner, member)
    assert joiner.copies.wait([MEMBER], lambda: None)
    member.train()
    assert list_bits(joiner.copies.finish(member.step, lambda: None)) == list_bits(member.state.states)


def test_a_worker_waits_no_more_when_the_members_have_gone_on(pair):
    _, joiner = pair
    assert not joiner.copies.wait([MEMBER, HostName("nobody")], lambda: None, lambda: True)


def test_copies_of_another_model_are_dropped(pair):
    member, joiner = pair
    assert joiner.copies.wait([MEMBER], lambda: None)
    key = joiner.copies._make_key(COPY_SUMS_MAIL, member.step, 0)
    joiner.service.box.put(Mail(key=key, data=memoryview(b"short"), shape=(5,)))
    assert joiner.copies.finish(member.step + 1, lambda: None) == {}


def test_a_step_that_is_committed_while_hosts_agree_makes_no_copies(make_host):
    member, joiner = make_host(MEMBER), make_host(JOINER)
    member.service.enter(GENERATION, {MEMBER: member.service.address})
    everything = range(len(joiner.state.units))
    joiner.copies.request({MEMBER: member.service.address}, {MEMBER: everything, JOINER: everything})
    wait_for_mail(member)
    table = CommitTable(divisor=1.0, norm=1.0, loss=1.0, results={})
    few = CommittedStep(step=member.step, table=table, sums={0: {}})
    member.copies.pass_commit(few, [MEMBER], [{MEMBER}] * len(member.state.units))
    assert not member.copies.has_begun
    member.train()
    assert member.copies.has_begun


@pytest.fixture
def member(make_host):
    """A member that trains, and is the first one."""
    host = make_host(MEMBER)
    host.service.enter(GENERATION, {MEMBER: host.service.address})
    host.train()
    return host


def make_spare(make_host):
    """Return a host that has compiled its updates, as one that is ready has."""
    host = make_host(JOINER)
    host.train()
    return host


def plan(member, *spares, deadline_s=float("inf")):
    """Have the first member ask for copies for hosts that join by a planned change; return what it knows of it."""
    planned = PlannedCopies(MEMBER, GENERATION, member.service)
    everything = set(range(len(member.state.units)))
    addresses = {spare.name: spare.service.address for spare in spares}
    wanted = dict.fromkeys(member.hosts, ()) | dict.fromkeys([MEMBER, *addresses], everything)
    planned.prepare(GENERATION + 1, wanted, addresses, deadline_s)
    return planned


def has_all(member):
    """Return whether a planned change waits for this member no more."""
    request = member.copies._request
    return request is not None and request.is_planned and member.copies._has_told


def train_until(member, is_over):
    deadline = Deadline(WAIT_S)
    while not is_over():
        assert deadline.find_rest_s() > 0
        member.train()


def take(spare, step, hosts, prefetch=None, check=lambda: None):
    """Return the units that a host has copies of when it begins the generation of the planned change."""
    taken = {}
    wait_for_mail(spare)  # the kernel of its sender may have it only
    spare.state.replace({})
    services = SimpleNamespace(parts_step=step)
    world = SimpleNamespace(
        generation=GENERATION + 1, hosts=hosts, step_services=services, raise_if_ended=check
    )
    worker: Any = SimpleNamespace(
        host=spare.name,
        service=spare.service,
        state=spare.state,
        routed_in=0,
        config=SimpleNamespace(num_microbatches=MICROBATCHES, max_norm=MAX_NORM),
        cut=SimpleNamespace(changed_variables={name: (None, one) for name, one in spare.changed.items()}),
        replace_state=lambda step, states, are_copies: taken.update(states),
    )
    placement: Any = SimpleNamespace(world=world, sharding=make_single_device_stage())
    (prefetch or BlockPrefetch()).take(placement, worker, spare.shapes)
    return taken


def test_a_host_that_joins_has_its_copies_also_where_the_one_that_asked_for_them_leaves(member, make_host):
    spare = make_spare(make_host)
    plan(member, spare)
    train_until(member, lambda: has_all(member))
    assert list_bits(take(spare, member.step, [JOINER])) == list_bits(member.state.states)


def test_a_worker_that_has_asked_gets_its_copies_by_a_planned_change_that_comes_before(pair):
    member, joiner = pair
    plan(member, joiner)
    train_until(member, lambda: has_all(member))
    assert not joiner.copies.wait([MEMBER, HostName("nobody")], lambda: None), "it is told that these end"
    prefetch = BlockPrefetch()
    prefetch._copies = joiner.copies
    found = take(joiner, member.step, [MEMBER, JOINER], prefetch)
    assert list_bits(found) == list_bits(member.state.states)


def test_a_host_that_is_lost_before_it_joins_leaves_the_others_their_copies(member, make_host):
    lost, spare = make_host(HostName("c")), make_spare(make_host)
    lost.service.close()
    plan(member, lost, spare)
    train_until(member, lambda: has_all(member))
    assert list_bits(take(spare, member.step, [MEMBER, JOINER])) == list_bits(member.state.states)


def test_copies_and_sums_that_are_late_are_waited_for_when_the_members_change(member, make_host):
    spare = make_spare(make_host)
    plan(member, spare)
    last = member.step + 3

    def train_on():
        if member.step < last:
            member.train()

    found = take(spare, last, [MEMBER, JOINER], check=train_on)
    assert list_bits(found) == list_bits(member.state.states)


def test_copies_that_are_being_packed_when_the_members_change_are_sent(member, make_host, monkeypatch):
    monkeypatch.setattr(unit_copies, "CATCH_UP_TIMEOUT_S", WAIT_S)  # a busy machine packs for longer
    spare = make_spare(make_host)
    plan(member, spare)
    member.train()
    assert member.copies.finish(member.step, lambda: None) == {}
    assert list_bits(take(spare, member.step, [MEMBER, JOINER])) == list_bits(member.state.states)


def test_a_member_has_not_sent_what_a_host_has_not_taken(member, make_host):
    with socket.create_server(("127.0.0.1", 0)) as server:  # it answers nobody
        port = server.getsockname()[1]
        service = SimpleNamespace(address=f"127.0.0.1:{port}")
        plan(member, SimpleNamespace(name=JOINER, service=service))
        train_until(member, lambda: member.copies._packing and all(f.done() for f in member.copies._packing))
        member.train()
        assert not member.copies._has_told
    train_until(member, lambda: has_all(member))  # that host is lost


def test_sums_for_a_host_that_reads_none_are_bounded(member, make_host, monkeypatch):
    """Another member is never ready."""
    spare, state_bytes = make_host(JOINER), sum(one.nbytes for one in jax.tree.leaves(member.state.states))
    monkeypatch.setattr(unit_copies, "FREE_SUMS_BYTES", 0)
    member.hosts = [MEMBER, HostName("b")]
    planned, found = plan(member, spare), []
    while not found:
        member.train()
        assert member.step < 100
        assert member.copies.has_begun, "they are sent until the change comes"
        found += [number] if (number := planned.pass_commit(member.step)) is not None else []
    assert found == [GENERATION + 1]
    train_until(member, lambda: not member.copies.has_begun)
    member.service.wait_sent(time.monotonic() + WAIT_S)
    limit = 2 * unit_copies.MAX_SUMS_RATIO * state_bytes
    box, sums_bytes = spare.service.box, 0
    while (mail := box.try_take_kind(COPY_SUMS_MAIL)) is not None:
        sums_bytes += mail.data.nbytes
    assert sums_bytes < limit + state_bytes


def test_a_host_that_is_no_member_drops_copies_for_a_change_that_did_not_come():
    box, kinds = Mailbox(), (COPIES_WANTED_MAIL, COPY_MAIL, COPY_SUMS_MAIL)
    for generation in (GENERATION, GENERATION + 1):
        for kind in kinds:
            box.put(Mail(key=MailKey(generation, 2**62, kind, 0, 0), data=memoryview(b"12345678")))
    drop_old_mail(box, GENERATION)
    assert box.try_take_kind(COPY_MAIL, lambda key: key.generation == GENERATION) is not None
    drop_old_mail(box, GENERATION + 1)
    left = [box.try_take_kind(kind) for _ in range(2) for kind in kinds]
    assert [mail.key.generation for mail in left if mail is not None] == [GENERATION + 1] * 3


def test_the_time_for_copies_begins_when_the_order_to_pause_comes(member):
    """And not with the next commit, before which there may be an evaluation."""
    pause = HeldPause(
        generation=GenerationNumber(GENERATION + 1),
        next_members=NextMembers(hosts=(MEMBER,), copy_timeout_s=10.0),
        received_s=time.monotonic() - 11.0,
    )
    planned = PlannedCopies(MEMBER, GENERATION, member.service)
    world = SimpleNamespace(hosts=(MEMBER,))
    worker: Any = SimpleNamespace(state=SimpleNamespace(units=()))
    placement: Any = SimpleNamespace(
        world=world, block_costs=(1.0,), num_stages=1, stage_hosts=(MEMBER,), device_speeds={}
    )
    _prepare(planned, pause, placement, worker)
    assert planned.pass_commit(member.step) is None
    assert planned.pass_commit(member.step + 1) == GENERATION + 1


def test_holders_take_turns_in_sending_and_what_a_host_has_is_not_sent():
    a, b, c = map(HostName, "abc")
    found = plan_moves([{a, b}, {a, b}, {c}], {a: {0, 1, 2}, b: {0, 1}, c: {0, 1, 2}})
    assert found == (
        UnitMove(unit=0, sender=a, receiver=c),
        UnitMove(unit=1, sender=b, receiver=c),
        UnitMove(unit=2, sender=c, receiver=a),
    )
