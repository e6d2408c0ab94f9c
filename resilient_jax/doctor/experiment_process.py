"""A process of the experiments: it joins a world with JAX, adds up with the others, and executes orders.

Orders are JSON lines on stdin, executed in order on the main thread, each answered by a JSON line on the descriptor
that was standard output (gloo and NCCL print to descriptor 1). The thread that reads them is the guard: `interrupt` is
executed at once, and repeated until the main thread has answered.

Run: python -m resilient_jax.doctor.experiment_process
"""

import dataclasses
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.abort import abort_collectives
from resilient_jax.jax_runtime.distributed import (
    WorldConnection,
    connect,
    disconnect,
    read_peer_listeners,
)
from resilient_jax.jax_runtime.failures import is_collective_failure
from resilient_jax.jax_runtime.live_nodes import end_waiting_threads, interrupt_meeting, meet_members
from resilient_jax.jax_runtime.live_processes import set_members
from resilient_jax.jax_runtime.world_forming import WorldSeat, interrupt_forming

INTERRUPT_INTERVAL_S: Final = 0.02
LISTENER_TIMEOUT_S: Final = 10.0
MIB: Final = 2**20
ROW: Final = 1024
"""Elements that each device has; their sum is exact in float32."""


class ExperimentProcess:
    """Executes the orders of one experiment after the other."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        # Taken to interrupt and to answer, so that no interruption hits the next order.
        self._lock = threading.Lock()
        self._answered = 0
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._connection: WorldConnection | None = None
        self._kept: jax.Array | None = None

    def run(self) -> None:
        """Execute orders until standard input ends, which ends the process."""
        threading.Thread(target=self._listen, name="resilient-jax-guard", daemon=True).start()
        self._answer(pid=os.getpid())
        while True:
            order = self._orders.get()
            began_s = time.monotonic()
            try:
                execute: Callable[..., dict[str, Any] | None] = getattr(self, order.pop("do"))
                found = execute(**order) or {}
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                found = {"error": text, "is_collective_failure": is_collective_failure(error)}
            self._answer(seconds=time.monotonic() - began_s, **found)

    # Orders.

    def join(
        self, address: str, seat: int, num_seats: int, members: list[int], timeout_s: float
    ) -> dict[str, Any]:
        """Connect to a world that `members` form, or, without members, to one that has been formed."""
        place = WorldSeat(
            address=address,
            seat=Seat(seat),
            num_seats=num_seats,
            members=tuple(Seat(member) for member in members),
        )
        self._connection = connect(place, timeout_s=timeout_s, bind_host="127.0.0.1")
        return {"devices": jax.device_count(), "kind": jax.local_devices()[0].device_kind}

    def meet(self, members: list[int], timeout_s: float) -> None:
        """Meet the members of a generation, and count them alone from now on."""
        connection = self._get_connection()
        seats = [Seat(member) for member in members]
        set_members(seats)
        meet_members(connection.place, seats, timeout_s)
        listeners = read_peer_listeners(seats, connection.place.seat, LISTENER_TIMEOUT_S)
        gloo = dataclasses.replace(connection.gloo, peer_listeners=connection.gloo.peer_listeners | listeners)
        self._connection = dataclasses.replace(connection, gloo=gloo)

    def add_up(self) -> dict[str, Any]:
        """Add up over the devices of all members; return the sum and what it should be."""
        devices = jax.devices()
        self._answer(is_in=True)  # from now on it waits for the others
        return {"total": _add_up(devices), "expected": float(ROW * sum(range(1, len(devices) + 1)))}

    def keep(self, mib: int) -> dict[str, Any]:
        """Make an array of so many MiB on the first local device, and keep it."""
        where = SingleDeviceSharding(jax.local_devices()[0])
        make = jax.jit(jnp.ones, static_argnums=0, out_shardings=where)
        self._kept = make(mib * MIB // 4).block_until_ready()
        return {"resident_mib": _measure_resident_mib()}

    def leave(self) -> dict[str, Any]:
        """Drop the array, the backend and the client; return what could not be freed."""
        connection, self._connection, self._kept = self._get_connection(), None, None
        end_waiting_threads(connection.place)
        leaks = disconnect(connection.gloo)
        return {
            "leaked_backends": leaks.backends,
            "leaked_clients": leaks.clients,
            "resident_mib": _measure_resident_mib(),
        }

    # Threads.

    def _listen(self) -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "interrupt":
                # Without effect if the main thread has answered meanwhile: it would hit the next order.
                answered = order["while_answered"]
                threading.Thread(target=self._interrupt, args=(answered,), daemon=True).start()
            else:
                self._orders.put(order)
        os._exit(0)

    def _interrupt(self, while_answered: int) -> None:
        while True:
            with self._lock:
                if self._answered != while_answered:
                    return
                interrupt_forming()
                interrupt_meeting()
                if self._connection is not None:
                    abort_collectives(self._connection.gloo)
            time.sleep(INTERRUPT_INTERVAL_S)

    def _answer(self, **words: object) -> None:
        with self._lock:
            self._answered += 1
            self._answers.write(json.dumps(words) + "\n")
            self._answers.flush()

    def _get_connection(self) -> WorldConnection:
        if self._connection is None:
            raise RuntimeError("found no world, expected one; give the order `join` first")
        return self._connection


def _add_up(devices: Sequence[Any]) -> float:
    mesh = Mesh(np.array(devices), ("device",))
    rows = jax.make_array_from_callback(
        (len(devices), ROW),
        NamedSharding(mesh, P("device")),
        lambda index: np.full((1, ROW), (index[0].start or 0) + 1, np.float32),  # pyright: ignore[reportOptionalSubscript]
    )
    return float(jax.jit(_total, out_shardings=NamedSharding(mesh, P()))(rows))


def _total(rows: jax.Array) -> jax.Array:
    return rows.sum()


def _measure_resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def main() -> None:
    """Execute orders; descriptor 1 leads to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ExperimentProcess(answers).run()


if __name__ == "__main__":
    main()
