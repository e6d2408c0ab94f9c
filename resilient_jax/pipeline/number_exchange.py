"""Small arrays that hosts tell each other by mail: for worlds that can form no collective."""

import dataclasses
from collections.abc import Sequence

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.pipeline.pipeline_step import PipelineWorker
from resilient_jax.pipeline.step_progress import PROGRESS_STEP
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.telemetry.worker_activity import worker_activity
from resilient_jax.transport.mail_protocol import MailKind


class HostNumbers(msgspec.Struct, frozen=True):
    """Arrays of a host, as raw bytes: all hosts know their shapes and dtypes."""

    data: bytes


class NumberExchange:
    """The exchanges of one generation, which all hosts make in the same order.

    Args:
        worker: whose mail is used; its generation has begun.
        hosts: of the generation, in the same order everywhere.
    """

    def __init__(self, worker: PipelineWorker, hosts: Sequence[HostName]) -> None:
        self._worker, self._hosts = worker, hosts
        self._number = 0

    def __call__(self, data: bytes) -> list[bytes]:
        """Return the bytes of each host, in the order of `hosts`.

        Raises:
            PeerUnreachable: a host is lost, or late.
        """
        number, self._number = self._number, self._number + 1
        # Not of the step under way: hosts may be in different ones.
        mail = dataclasses.replace(self._worker.make_mail(), step=PROGRESS_STEP)
        with worker_activity.task(WorkerTask.SUM):  # a wait for other hosts
            found = mail.exchange_messages(
                self._hosts, self._worker.host, MailKind.HOST_NUMBERS, HostNumbers(data), number
            )
        return [found[host].data for host in self._hosts]
