"""A worker without JAX: it speaks the worker's protocol with its agent, builds no world, and trains by counting.

An agent starts it as any script. A step takes a second; the state is a number, which every host has.
"""

import contextlib
import os
import threading
import time

from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.generation import SeatId
from resilient_jax.protocol.worker_messages import (
    AGENT_CONNECTION_VARIABLE,
    WORKER_ORDER_DECODER,
    WORKER_SETTINGS_DECODER,
    WORKER_SETTINGS_VARIABLE,
    AdmissionRequested,
    FormWorld,
    Heartbeat,
    LeaseRenewed,
    StepCommitted,
    StopWorker,
    TakeSeat,
    TakeStacks,
    WorkerMessage,
    WorkerOrder,
)
from resilient_jax.protocol.worker_report import TrainingProgress
from resilient_jax.worker import worker_protocol
from resilient_jax.worker.worker_protocol import (
    OrderRefused,
    StepDecision,
    Transition,
    WorkerProtocol,
    get_seat,
)

STEP_S = 1.0


class StubWorker:
    """The main thread and the guard of a worker, in one loop."""

    def __init__(self, descriptor: int, host: str) -> None:
        self._connection = Connection[WorkerMessage, WorkerOrder](descriptor, WORKER_ORDER_DECODER)
        self._protocol: WorkerProtocol = worker_protocol.make_initial_protocol(polls_checkpoints=False)
        self._host = host
        self._step = 0

    def run(self) -> None:
        """Follow orders until the job is over, or the agent is gone."""
        threading.Thread(target=self._beat, daemon=True).start()
        self._connection.send(AdmissionRequested(script={"script": "stub"}))
        next_step_s = 0.0
        while True:
            for received in self._connection.receive(STEP_S / 4):
                if not isinstance(received.message, LeaseRenewed | TakeStacks):
                    now_s = time.monotonic()
                    self._apply(worker_protocol.handle_order(self._protocol, received.message, now_s))
            state = self._protocol.report.state
            if state is state.STARTING and self._protocol.is_admitted:
                self._apply(worker_protocol.join_job(self._protocol, ""))
            elif state is state.RUNNING and time.monotonic() >= next_step_s:
                self._make_step()
                next_step_s = time.monotonic() + STEP_S
            if self._protocol.report.state is state.RUNNING and self._protocol.is_interrupted:
                self._stop()
            if self._follow_order():
                return

    def _follow_order(self) -> bool:
        """Follow the order that is due, if the worker waits for one; return whether it ends this worker."""
        if self._protocol.report.state is not self._protocol.report.state.IDLE:
            return False
        self._protocol, order, answers = worker_protocol.try_take_order(self._protocol)
        for answer in answers:
            self._send(answer)
        match order:
            case FormWorld(generation=generation, host=host):
                member = generation.membership.find_member(host)
                assert member is not None, "only members form a world"
                self._step = generation.state.step
                seat = SeatId(generation.membership.world, member.seat)
                self._apply(
                    worker_protocol.report_formed(
                        self._protocol, seat, generation.state.step, holds_state=True
                    )
                )
            case TakeSeat():
                self._apply(worker_protocol.report_seat(self._protocol, get_seat(order).world, None))
            case StopWorker():
                return True
            case None:
                pass
        return False

    def _make_step(self) -> None:
        self._protocol, decision = worker_protocol.try_begin_step(self._protocol, self._step)
        if decision is StepDecision.START:
            self._step += 1
            self._send(StepCommitted(progress=TrainingProgress(step=self._step)))
            self._apply(
                worker_protocol.report_commit(self._protocol, self._step, holds_state=True, part=None)
            )
        elif decision is StepDecision.END:
            self._stop()

    def _stop(self) -> None:
        self._apply(
            worker_protocol.report_idle(
                self._protocol,
                step=self._step,
                holds_state=True,
                part=None,
                snapshot=None,
                copied=None,
                done=False,
                failure=None,
            )
        )

    def _apply(self, transition: Transition) -> None:
        self._protocol, answers = transition
        for answer in answers:
            self._send(answer)

    def _send(self, message: WorkerMessage | OrderRefused) -> None:
        if not isinstance(message, OrderRefused):
            self._connection.send(message)

    def _beat(self) -> None:
        while True:
            time.sleep(1.0)
            self._connection.send(Heartbeat())


def main() -> None:
    settings = WORKER_SETTINGS_DECODER.decode(os.environ[WORKER_SETTINGS_VARIABLE].encode())
    with contextlib.suppress(EOFError, OSError):  # the agent is gone
        StubWorker(int(os.environ[AGENT_CONNECTION_VARIABLE]), settings.host).run()


if __name__ == "__main__":
    main()
