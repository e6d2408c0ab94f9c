"""An evaluation by the hosts of a pipeline: forward passes alone, and the results of all hosts to every host.

A host runs the microbatches of its replica in order: it takes the values of the stage before, computes its blocks, and
sends what they return to the stage after. Nothing is kept of a microbatch but its loss and metrics, and no weights are
sent. A stage sends at most `MAX_IN_FLIGHT` values that the next one has not taken, so that a fast stage does not fill
the memory of a slow one. No host waits for a later microbatch, so hosts cannot deadlock.

An evaluation changes no state. If a host is lost in it, the next generation does all of it again.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import msgspec
import numpy as np

from resilient_jax.blocks.block_programs import Boundary
from resilient_jax.blocks.forward_model import ForwardBlock
from resilient_jax.blocks.model_weights import Weights
from resilient_jax.host_exchange.array_packing import pack_arrays
from resilient_jax.host_exchange.step_mail import StepMail
from resilient_jax.ids import HostName
from resilient_jax.pipeline.stage_runner import LOSS, ReadMicrobatch
from resilient_jax.pipeline_schedule.routes import Route, Routes
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.sharding.stage_sharding import StageSharding, make_single_device_stage
from resilient_jax.telemetry.worker_activity import worker_activity
from resilient_jax.transport.mail_protocol import MailKey, MailKind

EVALUATED_MAIL: Final = MailKind("evaluated")
"""The input of a block, in an evaluation."""
TAKEN_MAIL: Final = MailKind("taken")
"""Says that the input of a block was taken, in an evaluation: the next one may be sent."""
RESULTS_MAIL: Final = MailKind("results")
"""What a host has of the loss and the metrics of an evaluation."""

MAX_IN_FLIGHT: Final = 4
"""Of values that one stage has sent and the next has not taken: enough to hide that stages take unequal times."""

Sent = collections.deque[tuple[HostName, MailKey]]


class _Taken(msgspec.Struct, frozen=True):
    """Says that a value was taken."""


class MicrobatchResults(msgspec.Struct, frozen=True):
    """Loss and metrics of a microbatch that are made on one host.

    Attributes:
        microbatch: index in the evaluation.
        values: float32 results by name.
    """

    microbatch: int
    values: Mapping[str, float]


class HostResults(msgspec.Struct, frozen=True):
    """What a host tells the others at the end of an evaluation."""

    found: tuple[MicrobatchResults, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageEvaluation:
    """One host's part in evaluations.

    Attributes:
        blocks: all blocks of the loss that is evaluated.
        read: reads microbatches.
        sharding: layout over this host's devices, with the axes of the blocks' abstract mesh.
        before_microbatch: called before this host computes a microbatch.
    """

    host: HostName
    blocks: Sequence[ForwardBlock]
    read: ReadMicrobatch
    sharding: StageSharding = dataclasses.field(default_factory=make_single_device_stage)
    before_microbatch: Callable[[int], None] = lambda microbatch: None

    def evaluate(
        self,
        routes: Routes,
        hosts: Sequence[HostName],
        weights: Mapping[int, Weights],
        mail: StepMail,
    ) -> dict[str, np.float32]:
        """Return the sums of loss and metrics over all microbatches, by name. Every host must call this.

        Args:
            routes: one route for each microbatch, in the order of microbatches.
            hosts: all that take part, in the same order everywhere.
            weights: block number to weights, for each block that this host has.
            mail: mail of this generation, at the step whose state is evaluated.

        Raises:
            PeerUnreachable: a host is lost, or late.
        """
        found: list[MicrobatchResults] = []
        # The messages that confirm what this host has sent last.
        sent: Sent = collections.deque(maxlen=MAX_IN_FLIGHT)
        for route in routes:
            for hop in route.hops:
                if hop.host == self.host:
                    self.before_microbatch(route.microbatch)
                    own = range(hop.first_block, hop.end_block)
                    found.append(self._run_hop(route, own, weights, mail, sent))
        # Other replicas may still have many microbatches to compute, each of which may take as long as one wait.
        patient = dataclasses.replace(mail, wait_timeout_s=mail.wait_timeout_s * max(1, len(routes)))
        with worker_activity.task(WorkerTask.SUM):  # a wait for other hosts, as in a sum
            exchange = patient.make_exchange(hosts, self.host, RESULTS_MAIL)
            told = exchange.gather(HostResults(tuple(found)))
        return sum_results([one for results in told for one in results.found])

    def _run_hop(
        self,
        route: Route,
        own: range,
        weights: Mapping[int, Weights],
        mail: StepMail,
        sent: Sent,
    ) -> MicrobatchResults:
        """Compute the blocks of a hop; return what it makes of loss and metrics."""
        x = self._receive(route, own.start, mail)
        with worker_activity.task(WorkerTask.INPUT):
            batch, key = self.sharding.place_values(self.read(route.microbatch))
        results: dict[str, Any] = {}
        with worker_activity.task(WorkerTask.COMPUTE):
            for number in own:
                x, made = self.blocks[number].compute(weights[number], x, batch, key)
                results |= made
            jax.block_until_ready((x, results))
        if own.stop == len(self.blocks):
            results[LOSS] = x[0]
        else:
            self._send(route, own.stop, x, mail, sent)
        values = {name: float(np.asarray(value)) for name, value in results.items()}
        return MicrobatchResults(route.microbatch, values)

    def _receive(self, route: Route, block: int, mail: StepMail) -> Boundary:
        if block == 0:
            return ()
        sender = next(hop.host for hop in route.hops if hop.end_block == block)
        key = mail.make_key(EVALUATED_MAIL, route.microbatch, block)
        with worker_activity.task(WorkerTask.SUM):  # a wait for another host, as in a sum
            received = mail.take_arrays(sender, key, self.blocks[block].x)
        mail.send_message(sender, mail.make_key(TAKEN_MAIL, route.microbatch, block), _Taken())
        return self.sharding.place_values(received)

    def _send(
        self,
        route: Route,
        block: int,
        values: Boundary,
        mail: StepMail,
        sent: Sent,
    ) -> None:
        receiver = next(hop.host for hop in route.hops if hop.first_block == block)
        if len(sent) == MAX_IN_FLIGHT:
            confirming, key = sent[0]
            with worker_activity.task(WorkerTask.SUM):
                mail.take_message(confirming, key, _Taken)
        mail.send(receiver, mail.make_key(EVALUATED_MAIL, route.microbatch, block), pack_arrays(values))
        sent.append((receiver, mail.make_key(TAKEN_MAIL, route.microbatch, block)))


def sum_results(found: Sequence[MicrobatchResults]) -> dict[str, np.float32]:
    """Return the sum of each result over microbatches, rounded once: it depends on no order.

    >>> sum_results([MicrobatchResults(0, {"loss": 1e8}), MicrobatchResults(1, {"loss": 1.0})])["loss"]
    np.float32(1e+08)
    """
    values: dict[str, list[float]] = {}
    for one in found:
        for name, value in one.values.items():
            values.setdefault(name, []).append(value)
    with np.errstate(over="ignore"):
        return {name: np.float32(_add_up(addends)) for name, addends in sorted(values.items())}


def _add_up(addends: Sequence[float]) -> float:
    # `fsum` refuses to add infinities of both signs.
    return math.fsum(addends) if all(map(math.isfinite, addends)) else sum(addends)
