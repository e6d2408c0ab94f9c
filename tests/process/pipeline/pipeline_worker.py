"""Hosts of a pipeline. Each executes a test's orders, one JSON object a line; it answers each with one.

argv: the name of the host. The model, the data and the optimizer are the same in all processes. A process has two
devices, and computes on the first, or on both with the axis that it is told.
"""

import collections
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import optax
from jax.extend.backend import clear_backends
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from resilient_jax.blocks.cut_model import CutModel, cut_model
from resilient_jax.blocks.forward_model import cut_forward
from resilient_jax.errors import CallerError, PeerUnreachable, ResilientJaxError
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.pipeline.block_state import BlockState, UnitState, place_unit
from resilient_jax.pipeline.commit_table import CommitTable
from resilient_jax.pipeline.pipeline_config import PipelineConfig
from resilient_jax.pipeline.pipeline_step import PipelineGeneration, PipelineWorker
from resilient_jax.pipeline.planned_copies import PlannedCopies
from resilient_jax.pipeline.stage_evaluation import StageEvaluation
from resilient_jax.pipeline.state_units import list_state_units
from resilient_jax.pipeline.unit_copies import CommittedStep, UnitCopies
from resilient_jax.pipeline.unit_exchange import exchange_units
from resilient_jax.pipeline_schedule.routes import Route
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule, Task
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.sharding.stage_sharding import (
    StageSharding,
    make_abstract_stage_mesh,
    make_stage_mesh,
)
from resilient_jax.state.array_digest import digest_tree
from resilient_jax.state.peer_transfer import SERVICE, StateExchange, StateOffers
from resilient_jax.step import running_total
from resilient_jax.step.random_keys import make_microbatch_id, make_microbatch_key
from resilient_jax.transport import Credentials
from resilient_jax.transport.mail_protocol import Mail
from resilient_jax.transport.mail_service import MailService
from tests.support.cut_variables import init_units
from tests.support.patience import patience
from tests.support.small_decoders import ROWS, make_batch, make_nnx

SEED = 3
SEND_TIMEOUT_S = patience(6)
running_total.MIN_FIXED_POINT_SIZE = 200  # else all leaves of so small a model would be summed in bins


SPECS: dict[str, dict[str, P]] = {
    "": {},
    "tensor": {"qkv/kernel": P(None, "tensor"), "qkv/bias": P("tensor"), "mlp/kernel": P(None, "tensor")},
    "fsdp": {"kernel": P("fsdp"), "bias": P("fsdp"), "scale": P("fsdp"), "embedding": P("fsdp")},
}
"""By the axis of a host's devices and the end of a weight's name."""


CREDENTIALS = Credentials("token")


def make_sharding(cut: CutModel, axis: str) -> StageSharding:
    """Return the sharding of a stage over both devices, or on the first."""
    specs = {
        weight.name: spec
        for weight in cut.trace.table.weights
        for end, spec in SPECS[axis].items()
        if weight.name.endswith(end)
    }
    mesh = make_abstract_stage_mesh({axis: 2} if axis else {})
    devices = jax.local_devices()[: mesh.size]
    return StageSharding(mesh=make_stage_mesh(mesh, devices), weight_specs=specs, num_examples=ROWS)


def draw(step: int, microbatch: int) -> tuple[Any, Any]:
    """Return batch and key, a pure function of the step and the microbatch."""
    return make_batch(1000 * step + microbatch), make_microbatch_key(
        SEED, jnp.asarray(make_microbatch_id(step, microbatch))
    )


class Host:
    """A pipeline with its mail."""

    def __init__(self, name: HostName) -> None:
        self.name = name
        decoder = make_nnx()
        self.cut: CutModel = cut_model(decoder.loss, decoder.variables, *draw(0, 0))
        self.sharding = make_sharding(self.cut, "")
        self.evaluated = cut_forward(decoder.loss, decoder.variables, *draw(0, 0))
        self.weights = self.cut.trace.table.split(decoder.variables)
        self.optimizer = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))
        self.service: MailService | None = None
        self.offers, self.addresses = StateOffers(), dict[HostName, str]()
        self.received: collections.Counter[str] = collections.Counter()
        """The bytes of all mail of the pipeline, by kind: that of a host that is ahead comes before an order does."""
        self.pipeline: PipelineWorker | None = None
        self.ran: list[Task] = []
        self.copies: UnitCopies | None = None
        self.planned: PlannedCopies | None = None
        self.updates: dict[str, tuple[dict, dict]] = {}
        """The compiled updates of units, by axis: all pipelines of this process share them, as they share the cut's
        programs."""
        self.changed_after: int | None = None
        """The number of committed steps after which a planned change may come."""

    def read(self, step: int, microbatch: int) -> tuple[Any, Any]:
        """Return batch and key on the devices."""
        return self.sharding.place_values(draw(step, microbatch))

    def start(self, axis: str = "", **config: Any) -> dict:
        """Have a new pipeline, with no state, and a new mailbox."""
        self.close()
        self.offers.withdraw()  # generations have the numbers of those of the pipeline before
        self.service = MailService(
            self.name,
            "127.0.0.1",
            CREDENTIALS,
            lambda peer, error: None,
            services={SERVICE: self.offers.calls},
        )
        self.count_mail(self.service)
        config["schedule"] = PipelineSchedule(config["schedule"])
        self.sharding = make_sharding(self.cut, axis)
        abstract = self.sharding.with_mesh(self.sharding.mesh.abstract_mesh)
        cut = self.cut.with_sharding(abstract) if axis else self.cut
        self.pipeline = PipelineWorker(
            self.name, cut, self.optimizer, PipelineConfig(**config), self.service, self.read
        )
        state = self.pipeline.state
        state._updates, state._programs = self.updates.setdefault(axis, (state._updates, state._programs))
        return {"address": self.service.address}

    def count_mail(self, service: MailService) -> None:
        """Count what comes from now on."""
        self.received, put = collections.Counter(), service.box.put

        def count(mail: Mail) -> bool:
            self.received[mail.key.kind] += mail.data.nbytes
            return put(mail)

        vars(service.box)["put"] = count

    def execute(self, do: str, **words: Any) -> dict:
        """Execute one order."""
        if do == "start":
            return self.start(**words)
        pipeline = self.pipeline
        assert pipeline is not None
        match do:
            case "begin":
                generation = PipelineGeneration(
                    number=words["number"],
                    hosts=tuple(map(HostName, words["hosts"])),
                    holders=tuple(frozenset(map(HostName, hosts)) for hosts in words["holders"]),
                    addresses=words["addresses"],
                    sharding=self.sharding,
                )
                pipeline.enter(generation)
                self.addresses = words["addresses"]
                return {}
            case "count_done":
                return {"done": pipeline.num_finished_tasks}
            case "leave_world":
                pipeline.move_to_host()
                clear_backends()
                mesh = self.sharding.mesh
                assert isinstance(mesh, Mesh)
                here = make_stage_mesh(mesh, jax.local_devices()[: mesh.size])
                assert not set(here.devices.flat) & set(mesh.devices.flat), "the devices are others"
                self.sharding = self.sharding.with_mesh(here)
                return {}
            case "init":
                holders = [frozenset(map(HostName, hosts)) for hosts in words["holders"]]
                weights = jax.tree.map(jnp.copy, self.weights)  # an update deletes them
                init_units(pipeline.state, self.optimizer, weights, self.name, holders)
                pipeline.state.replace(self.place(pipeline.state.states))
                return {}
            case "run":
                routes = msgspec.convert(words["routes"], tuple[Route, ...])
                if "fail_in" in words:
                    self.fail_once(*words["fail_in"])
                return self.run(lambda before: pipeline.begin_step(routes, before), words.get("die_before"))
            case "agree":
                return {"step": pipeline.agree_on_step()}
            case "move":
                return self.move({HostName(host): set(units) for host, units in words["wanted"].items()})
            case "serve":
                self.serve(**words)
                return {}
            case "ask":
                copies = self.make_copies(words["number"])
                copies.request(words["addresses"], words["wanted"])
                return {"has_all": copies.wait(words["addresses"], lambda: None)}
            case "prepare":
                assert self.planned is not None
                deadline_s = time.monotonic() + words["timeout_s"]
                self.planned.prepare(words["number"], words["wanted"], {}, deadline_s)
                return {}
            case "has_copies":
                assert self.copies is not None
                return {"has_told": self.copies._has_told, "changed_after": self.changed_after}
            case "stop_copies":
                assert self.copies is not None
                self.copies.stop()
                return {}
            case "take_copies":
                return self.take_copies(words["step"])
            case "resume":
                return self.run(lambda before: pipeline.resume_step((), before), words.get("die_before"))
            case "finish":
                before = jax.tree.leaves(pipeline.state.states)
                table = pipeline.finish_step(self.make_fault(words.get("fault")))
                deleted = sum(leaf.is_deleted() for leaf in before)
                return {"norm": table.norm, "loss": table.loss, "kept": len(before) - deleted}
            case "evaluate":
                return self.evaluate(**words)
            case "digest":
                held = {b for number in pipeline.state.states for b in pipeline.state.units[number].blocks}
                return {
                    "step": pipeline.step,
                    "digests": {b: digest_tree(pipeline.state.list_weights(b)) for b in sorted(held)},
                }
        raise ValueError(do)

    def place(self, states: dict[int, UnitState]) -> dict[int, UnitState]:
        """Return units on the devices, as the programs take them."""
        units = list_state_units(self.cut)
        return {number: place_unit(units[number], state, self.sharding) for number, state in states.items()}

    def fail_once(self, block: int, microbatch: int) -> None:
        """Have the task fail that gives the gradients of a block for a microbatch, after it has computed them."""
        assert self.pipeline is not None
        sums = self.pipeline._sums
        add = sums.add

        def fail(*args: Any) -> None:
            if args[:2] == (block, microbatch):
                del vars(sums)["add"]
                raise CallerError("a program has failed")
            add(*args)

        vars(sums)["add"] = fail

    def move(self, wanted: dict[HostName, set[int]]) -> dict:
        """Have the units that this host wants, of which others send those that it has not."""
        pipeline = self.pipeline
        assert pipeline is not None
        exchange = StateExchange(
            own=self.name,
            id=SnapshotId(pipeline.step, GenerationNumber(pipeline.make_mail().generation)),
            number=1,
            offers=self.offers,
            credentials=CREDENTIALS,
            addresses=self.addresses,
            check=lambda: None,
            on_source_failed=lambda host, error: None,
            offer_timeout_s=pipeline.config.wait_timeout_s,
        )
        held = pipeline.state.all_states
        found = exchange_units(exchange, pipeline.unit_holders, wanted, held, self.make_shapes())
        moved = found.keys() - pipeline.state.all_states.keys()
        pipeline.state.hold({**found, **self.place({number: found[number] for number in moved})})
        return {"moved": len(moved)}

    def make_shapes(self) -> list[UnitState]:
        """Return the state of every unit of the model, as it is at first."""
        assert self.pipeline is not None
        whole = BlockState(self.pipeline.state.units, self.optimizer, num_microbatches=1)
        init_units(
            whole, self.optimizer, self.weights, self.name, [frozenset((self.name,))] * self.cut.num_blocks
        )
        return [whole.states[number] for number in sorted(whole.states)]

    def make_copies(self, number: int) -> UnitCopies:
        """Have no copies yet, in a generation."""
        pipeline = self.pipeline
        assert pipeline is not None
        self.copies = UnitCopies(
            self.name,
            number,
            pipeline.service,
            pipeline.state,
            self.make_shapes(),
            self.sharding,
            {},
        )
        return self.copies

    def serve(self, number: int, hosts: list[HostName], holders: list[list[HostName]]) -> None:
        """Have copies made for a change of members, and of what this host is to hold then."""
        pipeline = self.pipeline
        assert pipeline is not None
        copies = self.make_copies(number)
        planned = self.planned = PlannedCopies(self.name, number, pipeline.service)
        self.changed_after = None

        def pass_commit(committed: CommittedStep) -> None:
            copies.pass_commit(committed, hosts, holders)
            if planned.pass_commit(committed.step) is not None:
                self.changed_after = committed.step

        pipeline.after_commit = pass_commit
        pipeline.before_donation = copies.wait_until_packed

    def take_copies(self, step: int) -> dict:
        """Have the copies that are of a step as units of this host."""
        pipeline, copies = self.pipeline, self.copies
        assert pipeline is not None
        assert copies is not None
        found, kept = copies.finish(step, lambda: None), pipeline.state.all_states
        pipeline.replace_state(step, {**kept, **found}, are_copies=not kept)
        return {"taken": sorted(found)}

    def evaluate(self, routes: Any, hosts: list[str], die_before: Any) -> dict:
        """Evaluate; return the sums, and the bytes that have come since the pipeline began, by the kind of mail."""
        pipeline = self.pipeline
        assert pipeline is not None

        def before(microbatch: int) -> None:
            if [self.name, microbatch] == die_before:
                self.die()

        blocks = pipeline.state.list_complete_blocks()
        stage = StageEvaluation(
            host=self.name, blocks=self.evaluated, read=lambda index: draw(0, index), before_microbatch=before
        )
        weights = {block: pipeline.state.list_weights(block) for block in blocks}
        routes = msgspec.convert(routes, tuple[Route, ...])
        sums = stage.evaluate(routes, tuple(map(HostName, hosts)), weights, pipeline.make_mail())
        found = {name: value.tobytes().hex() for name, value in sums.items()}
        return {"sums": found, "received": dict(self.received)}

    def run(self, call: Callable[..., None], die_before: Any) -> dict:
        """Run tasks, and die before one if that is asked for."""
        self.ran.clear()
        victim = None if die_before is None else msgspec.convert(die_before, Task)

        def before(task: Task) -> None:
            if task == victim:
                self.die()
            self.ran.append(task)

        call(before)
        return {"ran": len(self.ran)}

    def make_fault(self, fault: str | None) -> Callable[[CommitTable], None]:
        """Return what happens between the table and the update."""

        def act(_: CommitTable) -> None:
            assert self.pipeline is not None
            if fault == "die in the update":
                self.pipeline.state.after_unit = lambda number: self.die()
            if fault == "fail in the update":
                self.pipeline.state.after_unit = self.fail_after_unit
            if fault == "die once all is sent":
                assert self.service is not None
                self.service.wait_sent(time.monotonic() + SEND_TIMEOUT_S)
                self.die()
            if fault == "die":
                self.die()
            if fault == "interrupt":
                raise PeerUnreachable("the generation has ended")

        return act

    def fail_after_unit(self, number: int) -> None:
        """Fail once, when one unit is updated and the others are not."""
        assert self.pipeline is not None
        self.pipeline.state.after_unit = lambda number: None
        raise CallerError("a program has failed")

    def die(self) -> None:
        """Die as a host does that loses its power."""
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        if self.service is not None:
            self.service.close()


def main() -> None:
    """Be a host until the test closes standard input."""
    host = Host(HostName(sys.argv[1]))
    units = [unit.blocks for unit in list_state_units(host.cut)]
    print(json.dumps({"blocks": host.cut.num_blocks, "units": units}), flush=True)
    with contextlib.closing(host):
        for line in sys.stdin:
            try:
                found = host.execute(**json.loads(line))
            except ResilientJaxError as error:
                found = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(found), flush=True)
