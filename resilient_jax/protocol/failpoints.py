"""Failpoints: where a test, a benchmark, the demo or a chaos campaign can hold or break a worker at a logical time.

A controller writes orders into a directory that the worker's environment names; a worker that hits such a failpoint
reports it in the same directory and waits until the order is gone, or fails as ordered. Without the variable nothing
is read. This is the only place where a fault is injected from inside a process.
"""

import contextlib
import enum
import os
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from resilient_jax.errors import MessageError
from resilient_jax.protocol.message_decoding import decode_message

FAILPOINTS_VARIABLE = "RESILIENT_JAX_FAILPOINTS"
HOLD_TIMEOUT_S = 60.0
"""A controller that died must not hang a worker forever."""
POLL_INTERVAL_S = 0.005
ANY_STEP = -1
ANY_INDEX = -1
"""Of failpoints that have no microbatch, and of orders for the first hit."""


class FailPoint(enum.StrEnum):
    """A place in the code where a worker can be held or broken."""

    BEFORE_INPUT = "before_input"
    """The data of a microbatch is about to be read, or waited for; not in a pipeline."""
    BEFORE_MICROBATCH = "before_microbatch"
    """A microbatch is about to be computed."""
    AFTER_MICROBATCH = "after_microbatch"
    """The microbatch's gradient was handed to the devices."""
    ON_DEVICE = "on_device"
    """A microbatch, or a measurement, was computed; the index is the number of a device that it ran on, on its host.
    Only a slow device is ordered here."""
    BEFORE_INPUT_GRADIENT = "before_input_gradient"
    """A stage of a pipeline is about to compute the gradient that the stage before waits for."""
    BEFORE_WEIGHT_GRADIENT = "before_weight_gradient"
    """A stage of a pipeline is about to compute the gradients of its weights for a microbatch."""
    BEFORE_EVALUATION_MICROBATCH = "before_evaluation_microbatch"
    """A stage of a pipeline is about to compute a microbatch of an evaluation."""
    IN_COLLECTIVE = "in_collective"
    """This host has entered a collective, on the thread that runs it; nothing is exchanged yet."""
    BEFORE_LIMITS = "before_limits"
    """The hosts have agreed on the limits of exact sums; this host does not use them yet."""
    BEFORE_REDUCE = "before_reduce"
    """The reduction is about to begin: the other hosts wait inside it."""
    AFTER_REDUCE = "after_reduce"
    """The reduction is done, the update is not."""
    AFTER_ALL_REDUCE = "after_all_reduce"
    """`World.all_reduce` has its sum, such as a norm."""
    DURING_UPDATE = "during_update"
    """A stage of a pipeline has updated a unit of its state, and not yet the next one."""
    BEFORE_COMMIT = "before_commit"
    """The update was handed to the devices; the committed state is the one before it."""
    BEFORE_CHECKPOINT = "before_checkpoint"
    """The trainer is about to gather the state for a checkpoint, and to hand it to the process that writes it."""
    AFTER_COMMIT = "after_commit"
    """Between two steps."""
    BEFORE_CONNECT = "before_connect"
    """A world is about to be formed, or a worker that joins is about to take its seat."""
    BEFORE_REHEARSAL = "before_rehearsal"
    """A worker that joins has its seat, and is about to load programs while the others train."""
    BEFORE_FORMED = "before_formed"
    """A worker is in the world of a new generation, with its state, and has not reported it."""
    BEFORE_COMPILE = "before_compile"
    """Training is about to compile a program, for which other hosts may wait."""
    # Snapshots: training
    BEFORE_COPY = "before_copy"
    """The snapshot server gave memory for this host's part; nothing is in it."""
    DURING_COPY = "during_copy"
    """A piece of the state is in the part."""
    AFTER_COPY = "after_copy"
    """The part is complete but for its mark."""
    DURING_RESTORE = "during_restore"
    """Some leaves of the state were restored from a snapshot."""
    DURING_COPIES = "during_copies"
    """A member of a pipeline has begun to send copies of units before members change, or has some; a step is updated,
    and not committed."""
    # In the snapshot server; the step is the snapshot's.
    BEFORE_PARITY = "before_parity"
    """This host's part is complete, nothing was exchanged."""
    DURING_PARITY = "during_parity"
    """A piece of the stripe that this host encodes is stored; the index counts pieces."""
    BEFORE_COMPLETE = "before_complete"
    """Part and parity are complete but for their mark."""
    BEFORE_COMMITTED = "before_committed"
    """All hosts are complete: on the root before its decision, on others before their mark."""
    BEFORE_SEND = "before_send"
    """Bytes of a snapshot are about to be sent; their digest is made. Belongs to no step."""


class HoldAction(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Wait until the order is gone."""


class ExitAction(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """End the process, as a script or a library does that calls `_exit`."""

    exit_code: int


class RaiseAction(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Raise `InjectedFault`, as an error in the user's code."""

    message: str


class HangAction(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Block the thread for `duration_s`; all other threads of the process continue."""

    duration_s: float


class DelayAction(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Wait for `delay_s` at every hit, until the order is gone."""

    delay_s: float


class SlowDeviceAction(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Have what is computed on a device take `factor` times as long, until the order is gone."""

    factor: float


class Corruption(enum.IntEnum):
    """What becomes of what was computed at a failpoint."""

    NONE = 0
    NAN = 1
    BIT_FLIP = 2
    """One bit is another: of a gradient the number stays finite, and nothing but a comparison notices."""


class FlipBitAction(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Flip one bit of what was computed here: silent corruption.

    Attributes:
        is_repeated: whether a bit is flipped at every hit from now on, or once.
    """

    is_repeated: bool = False


class CorruptAction(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Replace the elements that were computed here by NaN; of bytes that are sent flip one bit."""


FailPointAction = (
    HoldAction
    | ExitAction
    | RaiseAction
    | HangAction
    | DelayAction
    | SlowDeviceAction
    | CorruptAction
    | FlipBitAction
)


class InjectedFault(RuntimeError):
    """An error in the user's code that a controller ordered."""


class FailPointOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What these hosts do when they hit this failpoint in this step.

    A host carries out every action once, but `HoldAction`, `DelayAction`, `SlowDeviceAction` and a repeated
    `FlipBitAction`.
    """

    failpoint: FailPoint
    step: int
    hosts: tuple[str, ...]
    index: int = ANY_INDEX
    action: FailPointAction = HoldAction()
    name: str = "hold"

    @property
    def is_repeated(self) -> bool:
        """Whether a host carries it out at every hit."""
        match self.action:
            case HoldAction() | DelayAction() | SlowDeviceAction():
                return True
            case FlipBitAction(is_repeated=is_repeated):
                return is_repeated
            case _:
                return False

    def matches(self, host: str, place: FailPoint, step: int, index: int) -> bool:
        """Return whether the order is meant for a host at this failpoint."""
        return (
            self.failpoint is place
            and host in self.hosts
            and self.step in (ANY_STEP, step)
            and self.index in (ANY_INDEX, index)
        )


ORDERS_DECODER = msgspec.json.Decoder(tuple[FailPointOrder, ...])


class FailPoints:
    """The side of the process that is held or broken: carries out the orders in a controller's directory."""

    def __init__(self, directory: Path, host: str) -> None:
        self._directory = directory
        self._host = host

    @classmethod
    def from_environment(cls, host: str) -> "FailPoints | None":
        """Return the failpoints of this process; None unless a controller named a directory."""
        directory = os.environ.get(FAILPOINTS_VARIABLE)
        return cls(Path(directory), host) if directory else None

    def hit(self, failpoint: FailPoint, step: int = ANY_STEP, index: int = ANY_INDEX) -> Corruption:
        """Carry out the orders for this failpoint.

        Returns:
            What becomes of what was computed or is sent at the failpoint.

        Raises:
            InjectedFault: as ordered.
        """
        found = Corruption.NONE
        for order in _read_orders(self._directory):
            if order.matches(self._host, failpoint, step, index) and self._arrive(order, step):
                found = max(found, self._obey(order))
        return found

    def find_slow_factor(self, devices: Collection[int]) -> float:
        """Return how many times as long it takes to compute on these devices of the host: as on the slowest of them."""
        factor = 1.0
        for order in _read_orders(self._directory):
            is_meant = any(order.matches(self._host, FailPoint.ON_DEVICE, ANY_STEP, one) for one in devices)
            if is_meant and isinstance(order.action, SlowDeviceAction) and self._arrive(order, ANY_STEP):
                factor = max(factor, order.action.factor)
        return factor

    def _arrive(self, order: FailPointOrder, step: int) -> bool:
        """Mark that the host is here; return whether the order is still to be carried out."""
        mark = self._directory / f"at-{order.name}-{self._host}"
        try:
            with mark.open("w" if order.is_repeated else "x") as file:
                file.write(str(step))
        except OSError:
            return order.is_repeated
        return True

    def _obey(self, order: FailPointOrder) -> Corruption:
        match order.action:
            case HoldAction():
                end_s = time.monotonic() + HOLD_TIMEOUT_S
                while order in _read_orders(self._directory) and time.monotonic() < end_s:
                    time.sleep(POLL_INTERVAL_S)
            case ExitAction(exit_code=code):
                os._exit(code)
            case RaiseAction(message=text):
                raise InjectedFault(text)
            case HangAction(duration_s=seconds) | DelayAction(delay_s=seconds):
                time.sleep(seconds)
            case SlowDeviceAction():
                pass  # `find_slow_factor` says how slow, and who computes waits
            case CorruptAction():
                return Corruption.NAN
            case FlipBitAction():
                return Corruption.BIT_FLIP
        return Corruption.NONE


class FailPointController:
    """The controller's side, safe to share between threads. An order replaces one of the same name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._orders: dict[str, FailPointOrder] = {}

    def hold(
        self, failpoint: FailPoint, hosts: Iterable[str], step: int = ANY_STEP, index: int = ANY_INDEX
    ) -> None:
        """Hold these hosts at a failpoint from now on."""
        self.set_order(FailPointOrder(failpoint=failpoint, step=step, hosts=tuple(hosts), index=index))

    def set_order(self, order: FailPointOrder) -> None:
        """Set an order until `release`."""
        with self._lock:
            self._forget(order.name)
            self._orders[order.name] = order
            self._write()

    def list_held_hosts(self, name: str = "hold") -> frozenset[str]:
        """Return the hosts that have hit the failpoint of an order."""
        prefix = f"at-{name}-"
        return frozenset(path.name.removeprefix(prefix) for path in self.directory.glob(f"{prefix}*"))

    def release(self, name: str = "hold") -> None:
        """Withdraw the order of this name: hosts that it holds continue. Without such an order, do nothing."""
        with self._lock:
            self._forget(name)
            self._write()

    def _forget(self, name: str) -> None:
        if self._orders.pop(name, None) is not None:
            self._write()
        for path in self.directory.glob(f"at-{name}-*"):
            path.unlink()

    def _write(self) -> None:
        if not self._orders:
            (self.directory / "orders.json").unlink(missing_ok=True)
            return
        temporary = self.directory / "orders.tmp"
        temporary.write_bytes(msgspec.json.encode(tuple(self._orders.values())))
        temporary.replace(self.directory / "orders.json")


def _read_orders(directory: Path) -> tuple[FailPointOrder, ...]:
    path = directory / "orders.json"
    with contextlib.suppress(OSError, MessageError):
        return decode_message(ORDERS_DECODER, path.read_bytes(), str(path))
    return ()
