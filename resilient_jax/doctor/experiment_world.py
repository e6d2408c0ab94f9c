"""A world of real processes, with a coordination service, on which the experiments are made."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from resilient_jax.doctor.line_process import ExperimentFailed, LineProcess
from resilient_jax.jax_runtime.local_gpus import make_gpu_share_environment
from resilient_jax.jax_runtime.worker_environment import Platform, make_worker_environment

SERVICE_MODULE: Final = "resilient_jax.jax_runtime.coordination_service"
PROCESS_MODULE: Final = "resilient_jax.doctor.experiment_process"
START_TIMEOUT_S: Final = 120.0
"""Imports from a cold file system, by several processes at once."""
JOIN_TIMEOUT_S: Final = 120.0
"""Of a world: CUDA's contexts are made in it."""
ANSWER_TIMEOUT_S: Final = 120.0
"""Of orders that compile, and make NCCL's communicators."""
COLLECTIVE_TIMEOUT_S: Final = 60.0
SPARE_SEATS: Final = 2
MAX_PROCESSES: Final = 3


class ExperimentWorld:
    """The processes of one world, by their seats, and its service.

    Attributes:
        processes: processes that are members.
        kind: kind of the devices, as JAX names them.
        devices: ids of the devices for CUDA, one for each process that forms the world; on CPU any. Processes may share
            one.
    """

    def __init__(self, platform: Platform, devices: Sequence[str], environment: Mapping[str, str]) -> None:
        self.processes: dict[int, LineProcess] = {}
        self.kind = ""
        self._platform: Platform = platform
        self.devices = tuple(devices)
        self._environment = environment
        self._started: list[LineProcess] = []
        self._address = ""
        # On GPU there are no spare seats: a process returns under its old index.
        self.num_seats = len(devices) + (SPARE_SEATS if platform == "cpu" else 0)
        self._service: LineProcess | None = None

    def form(self) -> None:
        """Start the service and all processes, form the world, meet, and add up once.

        Raises:
            ExperimentFailed: a process ended, did not answer in time, or got a wrong sum.
        """
        with _as_failure():
            self._service = self._start(SERVICE_MODULE, self._environment)
            seats = list(range(len(self.devices)))
            processes = [self.start_process(seat) for seat in seats]
            self._service.read_line(START_TIMEOUT_S)
            self._service.send_line(f"127.0.0.1:0 {len(seats)} {self.num_seats}")
            answer = self._service.read_line(START_TIMEOUT_S)
            if not answer.startswith("serving "):
                raise ExperimentFailed(f"the coordination service: {answer}")
            self._address = answer.split()[1]
            for process in processes:
                process.answer(START_TIMEOUT_S)
            for seat, process in zip(seats, processes, strict=True):
                self.order_to_join(process, seat, members=seats)
                self.processes[seat] = process
            for process in processes:
                self.kind = find(process, JOIN_TIMEOUT_S)["kind"]
            self.meet()
            self.add_up()

    def start_process(self, seat: int) -> LineProcess:
        """Start a process with the devices of a seat's process; its first answer says that it is ready."""
        base = dict(self._environment)
        if self._platform == "gpu":
            base["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi numbers them
            shares = [(device,) for device in self.devices]
            base |= make_gpu_share_environment(f"seat-{seat}", shares, seat, base)
            # The memory that the experiments take is little, and others may use the GPUs.
            base.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        added = make_worker_environment(
            platform=self._platform,
            devices_per_host=1,
            cache_dir=None,
            collective_timeout_s=COLLECTIVE_TIMEOUT_S,
            base=base,
        )
        return self._start(PROCESS_MODULE, {**base, **added, "TF_CPP_MIN_LOG_LEVEL": "2"})

    def order_to_join(self, process: LineProcess, seat: int, members: Sequence[int]) -> None:
        """Order a process to take a seat; `members` as `WorldSeat` has them."""
        process.order(
            "join",
            address=self._address,
            seat=seat,
            num_seats=self.num_seats,
            members=list(members),
            timeout_s=JOIN_TIMEOUT_S,
        )

    def order_all(self, do: str, **words: object) -> None:
        """Give all members an order."""
        for process in self.processes.values():
            process.order(do, **words)

    def interrupt_all(self) -> None:
        """Break all members out of what they wait in, except for those that have answered since."""
        for process in self.processes.values():
            process.order("interrupt", while_answered=process.num_read)

    def meet(self) -> None:
        """Have the present members meet, as those of a new generation."""
        with _as_failure():
            self.order_all("meet", members=sorted(self.processes), timeout_s=ANSWER_TIMEOUT_S)
            for process in self.processes.values():
                find(process, ANSWER_TIMEOUT_S)

    def add_up(self) -> None:
        """Have the members add up over all their devices."""
        with _as_failure():
            self.order_all("add_up")
            for process in self.processes.values():
                find(process, ANSWER_TIMEOUT_S)
            for seat, process in self.processes.items():
                answer = find(process, ANSWER_TIMEOUT_S)
                if answer["total"] != answer["expected"]:
                    raise ExperimentFailed(
                        f"seat {seat}: found the sum {answer['total']}, expected {answer['expected']}"
                    )

    def report_lost(self, seat: int) -> None:
        """Have the service count the process of a seat as gone."""
        assert self._service is not None, "formed"
        with _as_failure():
            self._service.send_line(f"lost {seat}")
            answer = self._service.read_line(ANSWER_TIMEOUT_S)
        if not answer.startswith("lost "):
            raise ExperimentFailed(f"the coordination service: {answer}")

    def drop(self, process: LineProcess) -> None:
        """Kill a process, member or not."""
        self.processes = {s: p for s, p in self.processes.items() if p is not process}
        process.kill()

    def close(self) -> None:
        """End all processes. Idempotent."""
        for process in self._started:
            process.end()
        self._started.clear()
        self.processes.clear()

    def _start(self, module: str, environment: Mapping[str, str]) -> LineProcess:
        process = LineProcess(module, environment)
        self._started.append(process)
        return process


def find(process: LineProcess, timeout_s: float) -> dict[str, Any]:
    """Return the answer of a process.

    Raises:
        ExperimentFailed: the process has ended, did not answer in time, or its answer is an error.
    """
    with _as_failure():
        answer = process.answer(timeout_s)
    if "error" in answer:
        raise ExperimentFailed(str(answer["error"]))
    return answer


def wait_error(process: LineProcess, deadline_s: float) -> str | None:
    """Return the error that a process answers before `deadline_s` (monotonic); None if it answers none in time.

    Raises:
        ExperimentFailed: the process has ended.
    """
    try:
        answer = process.answer(max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        return None
    return str(answer.get("error", ""))


@contextlib.contextmanager
def _as_failure() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise ExperimentFailed(str(error)) from None
