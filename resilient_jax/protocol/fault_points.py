"""Places in a worker where a test, a benchmark or the demo can hold it, so that faults come at logical times.

A controller writes an order into a folder that the worker's environment names; a worker that comes to the
place says so in the same folder and waits until the order is gone. Without the variable nothing is read.
"""

import enum
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

DIRECTORY_VARIABLE = "RESILIENT_JAX_FAULT_POINTS"
HOLD_LIMIT_S = 60.0
"""A controller that died must not hang a worker for ever."""
POLL_S = 0.005
ANY_STEP = -1
ANY_INDEX = -1
"""At places that have no microbatch, and in orders for whichever comes first."""


class Place(enum.StrEnum):
    """Where a worker can be held."""

    BEFORE_MICROBATCH = "before_microbatch"
    """About to compute one microbatch."""
    BEFORE_SUM = "before_sum"
    """About to enter the reduction: the others wait inside it."""
    AFTER_SUM = "after_sum"
    """The sum is there, the update is not."""
    BEFORE_COMMIT = "before_commit"
    """In the update: it was handed to the devices, and the committed state is the one before it."""
    AFTER_COMMIT = "after_commit"
    """Between two steps."""
    BEFORE_CONNECT = "before_connect"
    """Forming a world."""
    # Snapshots: training
    BEFORE_COPY = "before_copy"
    """The snapshot server gave memory for this host's part; nothing is in it."""
    DURING_COPY = "during_copy"
    """A piece of the state is in the part."""
    AFTER_COPY = "after_copy"
    """All of it is, without the mark that makes it complete."""
    DURING_RESTORE = "during_restore"
    """Some leaves of the state came back from a snapshot."""
    # In the snapshot server; the step is the snapshot's.
    BEFORE_PARITY = "before_parity"
    """This host's part is there, nothing was exchanged."""
    DURING_PARITY = "during_parity"
    """A piece of the stripe that this host encodes is where it belongs; the index counts pieces."""
    BEFORE_COMPLETE = "before_complete"
    """Part and parity are there, the mark does not say so."""
    BEFORE_COMMITTED = "before_committed"
    """All hosts are complete: on the root it is not decided yet, on others it is, and the mark does not say so."""


class HoldOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Hold these hosts at this place of this step."""

    place: Place
    step: int
    hosts: tuple[str, ...]
    index: int = ANY_INDEX


class FaultPoints:
    """The worker's side."""

    def __init__(self, directory: Path, host: str) -> None:
        self._directory = directory
        self._host = host

    @classmethod
    def from_environment(cls, host: str) -> "FaultPoints | None":
        """None unless a controller asked for it."""
        directory = os.environ.get(DIRECTORY_VARIABLE)
        return cls(Path(directory), host) if directory else None

    def reach(self, place: Place, step: int = ANY_STEP, index: int = ANY_INDEX) -> None:
        """Waits here for as long as an order says so."""
        order = _read_order(self._directory)
        if order is None or order.place is not place or self._host not in order.hosts:
            return
        if order.step not in (ANY_STEP, step) or order.index not in (ANY_INDEX, index):
            return
        (self._directory / f"at-{self._host}").touch()
        end_s = time.monotonic() + HOLD_LIMIT_S
        while _read_order(self._directory) == order and time.monotonic() < end_s:
            time.sleep(POLL_S)


class FaultPointController:
    """The controller's side."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def hold(self, place: Place, hosts: Iterable[str], step: int = ANY_STEP, index: int = ANY_INDEX) -> None:
        """From now on these hosts wait at that place."""
        self.release()
        order = HoldOrder(place=place, step=step, hosts=tuple(hosts), index=index)
        temporary = self.directory / "order.tmp"
        temporary.write_bytes(msgspec.json.encode(order))
        temporary.replace(self.directory / "order.json")

    def held(self) -> frozenset[str]:
        """The hosts that have come there."""
        return frozenset(path.name.removeprefix("at-") for path in self.directory.glob("at-*"))

    def release(self) -> None:
        """Everybody goes on."""
        (self.directory / "order.json").unlink(missing_ok=True)
        for path in self.directory.glob("at-*"):
            path.unlink()


def _read_order(directory: Path) -> HoldOrder | None:
    try:
        return msgspec.json.decode((directory / "order.json").read_bytes(), type=HoldOrder)
    except (OSError, msgspec.DecodeError):
        return None
