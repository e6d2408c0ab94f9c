"""Copies of units for a worker that joins: the bits of the original after each step, and no harm from whoever dies."""

import contextlib
import threading
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_decoders import KEY, MAKERS, make_batch

import resilient_jax as rj
from resilient_jax.blocks.cut_model import cut_model
from resilient_jax.ids import HostName
from resilient_jax.pipeline.block_state import BlockState
from resilient_jax.pipeline.state_units import list_state_units
from resilient_jax.pipeline.unit_copies import CommittedStep, UnitCopies, UpdateFacts
from resilient_jax.pipeline.unit_exchange import UnitMove, plan_moves
from resilient_jax.sharding.stage_sharding import make_single_device_stage
from resilient_jax.trainer.accumulation import make_abstract
from resilient_jax.trainer.pipelined_loss import cut_training_loss, make_pipeline_config
from resilient_jax.trainer.train_step import TrainStep
from resilient_jax.trainer.unit_states import UnitStates
from resilient_jax.transport import Credentials
from resilient_jax.transport.mail_protocol import Mail, MailKind
from resilient_jax.transport.mail_service import MailService

MEMBER, JOINER = HostName("a"), HostName("d")
GENERATION, MICROBATCHES, MAX_NORM = 3, 4, 0.5
WAIT_S = 60.0
PACKING_S = 0.5
"""Longer than two updates take."""


class Host:
    """A host with a state and copies."""

    def __init__(self, name, parts):
        self.name, self.step = name, 0
        self.service = MailService(name, "127.0.0.1", Credentials("token"), lambda peer, error: None)
        self.changed = parts.changed
        self.state = BlockState(parts.units, parts.optimizer, None, parts.reduce_variable, donate=True)
        self.state.replace(jax.tree.map(jnp.copy, parts.states))  # of the other host, too
        shapes = [self.state.states[number] for number in range(len(parts.units))]
        self.copies = UnitCopies(
            name,
            GENERATION,
            self.service,
            self.state,
            shapes,
            make_single_device_stage(),
            UpdateFacts(num_microbatches=MICROBATCHES, max_norm=MAX_NORM, changed=parts.changed),
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
        norm, loss = draw.random(2, np.float32)
        self.copies.wait_until_packed()
        self.state.update(sums, MICROBATCHES, norm, MAX_NORM, loss)
        self.step += 1
        committed = CommittedStep(step=self.step, norm=float(norm), loss=float(loss), sums=sums)
        self.copies.pass_commit(committed, [MEMBER], [{MEMBER}] * len(self.state.units))


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
        whole = BlockState(self.units, self.optimizer)
        whole.init_units(weights, MEMBER, [{MEMBER}] * len(self.units))
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


@pytest.fixture
def make_host(request):
    parts = getattr(request, "param", Parts)()
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
    member.service.begin_generation(GENERATION, {MEMBER: member.service.address})
    member.train()
    ask(joiner, member)
    return member, joiner


def ask(joiner, member):
    """Ask the member, and have it train until it has begun to send."""
    everything = range(len(joiner.state.units))
    joiner.copies.request({MEMBER: member.service.address}, {MEMBER: everything, JOINER: everything})
    end_s = time.monotonic() + WAIT_S
    before = member.copies._request
    while member.copies._request is before or not member.copies.has_begun:
        assert time.monotonic() < end_s
        member.train()


def test_an_update_waits_for_the_units_that_are_being_packed_whose_arrays_it_deletes(make_host):
    member, joiner = make_host(MEMBER), make_host(JOINER)
    member.service.begin_generation(GENERATION, {MEMBER: member.service.address})
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
    end_s = time.monotonic() + WAIT_S
    while member.copies.has_begun:  # until it sees that nobody is there
        assert time.monotonic() < end_s
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
    end_s = time.monotonic() + WAIT_S
    while member.copies._request is None or member.copies._request.host != third.name:
        assert time.monotonic() < end_s
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
    key = joiner.copies._make_key(MailKind.COPY_SUMS, member.step, 0)
    joiner.service.box.put(Mail(key=key, data=memoryview(b"short"), shape=(5,)))
    assert joiner.copies.finish(member.step + 1, lambda: None) == {}


def test_a_step_that_is_committed_while_hosts_agree_makes_no_copies(make_host):
    member, joiner = make_host(MEMBER), make_host(JOINER)
    member.service.begin_generation(GENERATION, {MEMBER: member.service.address})
    everything = range(len(joiner.state.units))
    joiner.copies.request({MEMBER: member.service.address}, {MEMBER: everything, JOINER: everything})
    end_s = time.monotonic() + WAIT_S
    while not member.service.box.bytes_held:
        assert time.monotonic() < end_s
        member.service.box.wait_for_more(WAIT_S)
    few = CommittedStep(step=member.step, norm=1.0, loss=1.0, sums={0: {}})
    member.copies.pass_commit(few, [MEMBER], [{MEMBER}] * len(member.state.units))
    assert not member.copies.has_begun
    member.train()
    assert member.copies.has_begun


def test_holders_take_turns_in_sending_and_what_a_host_has_is_not_sent():
    a, b, c = map(HostName, "abc")
    found = plan_moves([{a, b}, {a, b}, {c}], {a: {0, 1, 2}, b: {0, 1}, c: {0, 1, 2}})
    assert found == (
        UnitMove(unit=0, sender=a, receiver=c),
        UnitMove(unit=1, sender=b, receiver=c),
        UnitMove(unit=2, sender=c, receiver=a),
    )
