"""Runs the tasks of one host strictly in their order, with the programs of blocks and the values that come by mail.

Orders of one simulation are a linear extension of one graph, and to send never waits: so hosts that run theirs in order
cannot deadlock. A failure leaves what is finished in place; `run` goes on with another order, in the same step.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, assert_never

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.blocks.block_programs import Boundary as BoundaryValues
from resilient_jax.blocks.cut_model import Block, CutModel
from resilient_jax.blocks.model_weights import Weights
from resilient_jax.errors import InternalError, PeerUnreachable
from resilient_jax.host_exchange.step_mail import StepMail
from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError
from resilient_jax.pipeline.boundary_log import BoundaryLog
from resilient_jax.pipeline.host_copies import can_copy, copy_to_host, place_copies
from resilient_jax.pipeline.task_timings import TaskTimings
from resilient_jax.pipeline_schedule.routes import Hop, Route
from resilient_jax.pipeline_schedule.tasks import (
    Boundary,
    BoundaryKind,
    Task,
    TaskKind,
    find_ends,
    find_input,
    find_output,
)
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.sharding.stage_sharding import StageSharding, make_single_device_stage
from resilient_jax.step.device_throttle import DeviceThrottle
from resilient_jax.telemetry.worker_activity import worker_activity

ReadMicrobatch = Callable[[int], tuple[Any, Any]]
"""Returns batch and random key of a microbatch of the step: a pure function, which every host calls for its own."""
BeforeTask = Callable[[Task], None]


class GradientSink(Protocol):
    """Where the gradients of a block for a microbatch go."""

    def has(self, block: int, microbatch: int) -> bool:
        """Return whether they are there already: a task that is run again adds nothing."""
        ...

    def add(
        self, block: int, microbatch: int, gradients: Mapping[str, Any], results: Mapping[str, Any]
    ) -> None:
        """Take the gradients, by weight, and what the block's forward pass returned beside its output, by path."""
        ...


LOSS = "loss"
"""The name of the loss among the results of the last block."""


class StageRunner:
    """The tasks of one host in one step.

    Attributes:
        done: the tasks that are finished in this step.
        timings: what the tasks of this step took.
        sharding: layout over this host's devices of what comes from other hosts. By default all is on the first one.
        throttle: makes devices slow that a chaos campaign has slowed down; None: none is.
    """

    def __init__(
        self,
        host: HostName,
        cut: CutModel,
        log: BoundaryLog,
        sink: GradientSink,
        sharding: StageSharding | None = None,
    ) -> None:
        self.done: set[Task] = set()
        self.timings = TaskTimings()
        self._host = host
        self._cut = cut
        self._log = log
        self._sink = sink
        self.sharding = sharding or make_single_device_stage()
        self.throttle: DeviceThrottle | None = None
        self._residuals: dict[tuple[int, Hop], list[tuple[Any, ...]]] = {}
        self._kept: dict[tuple[int, Hop], dict[int, Any]] = {}
        self._results: dict[tuple[int, int], dict[str, Any]] = {}
        """What tasks have left for later ones of their microbatch."""

    def begin_step(self) -> None:
        """Drop everything of the step before."""
        self.done.clear()
        self.timings.begin_step()
        self._residuals.clear()
        self._kept.clear()
        self._results.clear()
        self._log.clear()

    def move_to_host(self) -> bool:
        """Copy what tasks have left, and sent, to host memory until `place`; return whether it could be.

        If not, the step is to be dropped.
        """
        left = self._residuals, self._kept, self._results
        if not can_copy([list(found.values()) for found in left]):
            return False
        try:
            self._change_left(copy_to_host)
        except (
            JaxRuntimeError,
            ValueError,
            RuntimeError,
        ):  # of a task that failed when a clique was broken off
            return False
        self._log.move_to_host()
        return True

    def place(self, sharding: StageSharding) -> None:
        """Have on the devices of this host again what tasks have left."""
        self._change_left(lambda left: place_copies(left, sharding))

    def forget(self, tasks: AbstractSet[Task]) -> None:
        """Count tasks as not finished, because what they have sent is needed again and no longer in the log."""
        self.done -= tasks

    def run(
        self,
        order: Sequence[Task],
        routes: Mapping[int, Route],
        mail: StepMail,
        weights: Mapping[int, Weights],
        read: ReadMicrobatch,
        before_task: BeforeTask = lambda task: None,
    ) -> None:
        """Run the tasks that are not finished.

        Args:
            order: tasks of this host, as they follow one another.
            routes: microbatch to route.
            mail: mail of this step and generation.
            weights: block number to weights, for each block that the order has.
            read: gives batch and random key of a microbatch of this step.
            before_task: called before each task.

        Raises:
            PeerUnreachable: a value does not come. Finished tasks stay finished.
            Exception: what a program raises; the microbatch is computed again from the first task of its hop on.
        """
        for task in order:
            if task in self.done:  # before a failure, in another order of the same step
                continue
            before_task(task)
            route = routes[task.microbatch]
            with worker_activity.task(WorkerTask.SUM):  # a wait for another host, as in a sum
                received = self._receive(task, route, mail)
            started_s = time.monotonic()
            try:
                with worker_activity.task(WorkerTask.COMPUTE):
                    sent = self._run_at_speed(functools.partial(self._execute, task, received, weights, read))
            except BaseException:
                # A backward pass uses up what the forward pass has left, also where it fails: so all of the hop is done
                # again. What its tasks take is sent again when the step is resumed, as no finished task has used it.
                self.done -= {Task(kind, task.microbatch, task.hop) for kind in TaskKind}
                raise
            # Finished before it is sent: if the receiver is dead, the value is in the log for the one that takes over.
            self.done.add(task)
            if sent is not None:
                self._send(task, sent, route, mail)
            self.timings.add(task, time.monotonic() - started_s)

    def rehearse(
        self, block: Block, weights: Weights, data: tuple[Any, Any], kinds: Collection[TaskKind]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run a block's programs of these kinds of tasks on zeros; return gradients and results as a sink gets them."""
        batch, key = data
        zeros = [np.zeros(shape.shape, shape.dtype) for shape in block.x]
        y, results, residuals = block.programs.forward(weights, self._place(zeros), batch, key)
        if block.number + 1 == self._cut.num_blocks:
            results = {**results, LOSS: y[0]}
        g = self._place([np.zeros(v.shape, v.dtype) for v in y if jnp.issubdtype(v.dtype, jnp.inexact)])
        if TaskKind.BACKWARD in kinds:
            gradients, _ = block.programs.backward(weights, residuals, g)
        else:
            _, kept = block.programs.backward_input(weights, residuals, g)
            gradients = block.programs.backward_weights(weights, kept)
        return jax.block_until_ready(gradients), results

    def send_again(self, boundary: Boundary, to: HostName, mail: StepMail) -> None:
        """Send a value out of the log.

        Raises:
            InternalError: the value is not in the log.
        """
        value = self._log.get(boundary)
        if value is None:
            raise InternalError(
                f"{boundary} is not in the log of {self._host}; its task should have been run again"
            )
        mail.send(to, mail.make_boundary_key(boundary), value)

    def _change_left(self, change: Callable[[Any], Any]) -> None:
        for found in (self._residuals, self._kept, self._results):
            _change_each(found, change)

    def _place(self, values: Sequence[Any]) -> BoundaryValues:
        """Copy values to this host's devices: backward takes the memory of a gradient, so it must not be the mail's.

        They are committed to them, as what programs return is: else each program would be loaded once for either.
        """
        # A copy on a device would be all of it on the first one.
        copy = jnp.array if self.sharding.mesh.size == 1 else np.array
        return self.sharding.place_values(
            # An array of JAX is on other devices of this process, and copied in any case.
            tuple(value if isinstance(value, jax.Array) else copy(value, copy=True) for value in values)
        )

    def _receive(self, task: Task, route: Route, mail: StepMail) -> BoundaryValues | None:
        boundary = find_input(task, route.num_blocks)
        if boundary is None:
            return None
        sender, _ = find_ends(boundary, route)
        shapes = describe_boundary(self._cut, boundary)
        return self._place(mail.take_arrays(sender.host, mail.make_boundary_key(boundary), shapes))

    def _send(self, task: Task, values: BoundaryValues, route: Route, mail: StepMail) -> None:
        boundary = find_output(task, route.num_blocks)
        if boundary is None:
            return
        data = mail.pack(values)
        self._log.record(boundary, data)
        _, receiver = find_ends(boundary, route)
        # Of a dead receiver other tasks know nothing yet: those that need nothing of it go on.
        with contextlib.suppress(PeerUnreachable):
            mail.send(receiver.host, mail.make_boundary_key(boundary), data)

    def _run_at_speed(self, execute: Callable[[], BoundaryValues | None]) -> BoundaryValues | None:
        """Return what a task sends, later if a device of this host is slow."""
        if self.throttle is None:
            return execute()
        devices = self.sharding.mesh.devices
        return self.throttle.run(execute, () if devices is None else devices.flat)

    def _execute(
        self,
        task: Task,
        received: BoundaryValues | None,
        weights: Mapping[int, Weights],
        read: ReadMicrobatch,
    ) -> BoundaryValues | None:
        """Return what the task sends to another hop, if anything."""
        match task.kind:
            case TaskKind.FORWARD:
                return self._forward(task, received or (), weights, read)
            case TaskKind.BACKWARD | TaskKind.INPUT_GRADIENT:
                # Nothing comes for the last block: its gradient is that of the loss for itself.
                g = received if received is not None else self._place(self._cut.loss_gradient)
                return self._backward(task, g, weights)
            case TaskKind.WEIGHT_GRADIENT:
                for block, kept in self._kept.pop((task.microbatch, task.hop)).items():
                    programs = self._cut.blocks[block].programs
                    gradients = programs.backward_weights(weights[block], kept)
                    # Awaited: two programs with collectives on the same devices must not be in flight together.
                    self._hand_out(block, task.microbatch, jax.block_until_ready(gradients))
                return None
            case _:
                assert_never(task.kind)

    def _forward(
        self, task: Task, x: BoundaryValues, weights: Mapping[int, Weights], read: ReadMicrobatch
    ) -> BoundaryValues:
        started_s = time.monotonic()
        with worker_activity.task(WorkerTask.INPUT):
            batch, key = read(task.microbatch)
        self.timings.add_wait(task.microbatch, time.monotonic() - started_s)
        residuals: list[tuple[Any, ...]] = []
        for block in self._list_blocks(task):
            x, results, kept = block.programs.forward(weights[block.number], x, batch, key)
            residuals.append(kept)
            if block.number + 1 == self._cut.num_blocks:
                results = {**results, LOSS: x[0]}
            # Kept until the block's gradients are there: a sum takes both at once, or neither.
            self._results[task.microbatch, block.number] = results
        self._residuals[task.microbatch, task.hop] = residuals
        # Awaited once for all blocks: each needs the output of the one before, which keeps their order on all devices.
        jax.block_until_ready((x, residuals))
        return x

    def _backward(self, task: Task, g: BoundaryValues, weights: Mapping[int, Weights]) -> BoundaryValues:
        residuals = self._residuals.pop((task.microbatch, task.hop))
        kept: dict[int, Any] = {}
        for block in reversed(self._list_blocks(task)):
            own, programs = weights[block.number], block.programs
            if task.kind is TaskKind.BACKWARD:
                gradients, g = programs.backward(own, residuals.pop(), g)
                self._hand_out(block.number, task.microbatch, jax.block_until_ready(gradients))
            else:
                g, kept[block.number] = programs.backward_input(own, residuals.pop(), g)
        if kept:
            self._kept[task.microbatch, task.hop] = kept
        jax.block_until_ready((g, kept))
        return g

    def _hand_out(self, block: int, microbatch: int, gradients: Mapping[str, Any]) -> None:
        results = self._results.pop((microbatch, block))
        # A task that is run again for the value that it sends has added its gradients before.
        if not self._sink.has(block, microbatch):
            self._sink.add(block, microbatch, gradients, results)

    def _list_blocks(self, task: Task) -> Sequence[Block]:
        return self._cut.blocks[task.hop.first_block : task.hop.end_block]


def _change_each(found: dict[Any, Any], change: Callable[[Any], Any]) -> None:
    for key in found:  # one after the other, so that at most one is there twice
        found[key] = change(found[key])


def describe_boundary(cut: CutModel, boundary: Boundary) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of a boundary value."""
    values = cut.blocks[boundary.block].x
    if boundary.kind is BoundaryKind.GRADIENT:
        values = tuple(value for value in values if jnp.issubdtype(value.dtype, jnp.inexact))
    return values
