"""What the user's train function gets: the live hosts, their devices, the steps, and the state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from resilient_jax.errors import CallerError, StateError
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName, ProcessIndex
from resilient_jax.protocol.fault_points import FaultPoints, Place
from resilient_jax.training.held_state import HeldState, ShardingRule, hold, place_initial, restore
from resilient_jax.training.jax_runtime.handles import Device
from resilient_jax.training.reduction import HostSum

Tree = TypeVar("Tree")


class StepLink(Protocol):
    """What a world needs of the line to the agent."""

    def begin_step(self, step: int) -> None: ...
    def check(self) -> None: ...
    def committed(self, step: int, metrics: dict[str, float]) -> None: ...
    def happened(self, kind: EventKind, **detail: str | float | bool) -> Event: ...


class StateHolder:
    """The one place that holds the state between steps and between generations."""

    def __init__(self) -> None:
        self.state: HeldState | None = None

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self.state.step if self.state is not None else 0


class World:
    """One generation's members and devices, as the user's train function sees them.

    A world is valid until the train function is unwound; the next generation brings a new one.

    Attributes:
        generation: the agreed membership's number; it only grows.
        hosts: names of the live hosts, in order of their process index.
        host: this host's name.
        process_index: this worker's index in JAX's world; after a shrink the live ones have gaps.
        reason: why this generation was formed.
        change: how: "shrink" (in place) or "reform".
    """

    def __init__(
        self,
        *,
        generation: GenerationNumber,
        hosts: Mapping[ProcessIndex, HostName],
        process_index: ProcessIndex,
        holder: StateHolder,
        link: StepLink,
        change: str,
        reason: str,
        events: Sequence[Event] = (),
        fault_points: FaultPoints | None = None,
    ) -> None:
        self.generation = generation
        self.hosts = tuple(hosts[index] for index in sorted(hosts))
        self.host = hosts[process_index]
        self.process_index = process_index
        self.change = change
        self.reason = reason
        self._events = tuple(events)
        self._fault_points = fault_points
        self._indexes = sorted(hosts)
        self._holder = holder
        self._link = link
        self._step: int | None = None
        self._sum: HostSum | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """What this worker saw on its way into this generation, oldest first."""
        return self._events

    @property
    def host_index(self) -> int:
        """This host's place among `hosts`, dense from 0: 0 is the one that prints and saves."""
        return self._indexes.index(self.process_index)

    @property
    def devices(self) -> list[Device]:
        """The devices of the live hosts. `jax.devices()` lists dead ones, too, for ever."""
        live = set(self._indexes)
        return [device for device in jax.devices() if device.process_index in live]

    @property
    def local_devices(self) -> list[Device]:
        """This host's devices."""
        return jax.local_devices()

    def mesh(self, axes: str | Sequence[str] | Mapping[str, int]) -> Mesh:
        """A mesh over the devices of all live hosts.

        Args:
            axes: one axis name; or names with sizes, of which one may be -1 (what is left).

        Raises:
            CallerError: the sizes do not multiply to the number of live devices.
        """
        return _mesh(self.devices, axes, f"the {len(self.hosts)} live hosts")

    def local_mesh(self, axes: str | Sequence[str] | Mapping[str, int] = "data") -> Mesh:
        """A mesh over this host's devices alone: programs on it outlive every change of membership."""
        return _mesh(self.local_devices, axes, f"host {self.host}")

    def share(self, count: int) -> tuple[int, ...]:
        """This host's part of `count` microbatches: their indexes, uneven by at most one over hosts."""
        hosts, me = len(self.hosts), self.host_index
        return tuple(range(me * count // hosts, (me + 1) * count // hosts))

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left, from the first that is not committed up to `total`, exclusive.

        Between two steps is where hosts join and leave: a loop that does not use this is never grown.
        """
        for step in range(self._holder.step, total):
            self._link.begin_step(step)
            self._step = step
            yield step
            self._link.check()

    def restore_or_init(self, init: Callable[[], Tree], sharding: ShardingRule | None = None) -> Tree:
        """The state to go on from: what was committed last, else `init()`.

        Args:
            init: makes the initial state, a pytree of arrays; must be deterministic, every host calls it.
                Called abstractly (for the tree's shape) when there is a state already.
            sharding: where leaves shall lie; None: where they lie, or this host's first device. Required
                for leaves on a mesh of several hosts, because that mesh has changed.

        Raises:
            StateError: the committed state does not fit `init`, or cannot be placed.
        """
        self._link.check()
        held = self._holder.state
        if held is None:
            return place_initial(init(), sharding)
        return restore(jax.eval_shape(init), held, sharding)

    def commit(self, state: Any, **metrics: float) -> None:  # noqa: ANN401 - any pytree
        """Hands over the state after the current step: what survives a failure from here on.

        Waits until the arrays are computed, for a step that fails later was not done. The arrays are
        held, not copied: do not donate them before the next commit, except to a program that cannot fail
        because of other hosts (one on `local_mesh`), whose result is committed.

        Args:
            state: a pytree of arrays, complete on every host.
            metrics: numbers for the progress line, the status and the log.

        Raises:
            StateError: called outside of `steps`, or a leaf is no array or was donated.
        """
        if self._step is None:
            raise StateError(
                "commit was called outside of `for step in world.steps(...)`; commit inside of it"
            )
        jax.block_until_ready(state)
        self._holder.state = hold(self._step + 1, state)
        self._link.committed(self._step + 1, {name: float(value) for name, value in metrics.items()})
        self._reach(Place.AFTER_COMMIT)

    def sum(self, tree: Tree) -> Tree:
        """The sum over live hosts of each leaf, which lies where the leaf lay; one all-reduce.

        Every live host must call it, with the same shapes. The order of summation depends on the
        membership: equal within rounding, not bit for bit.

        Returns when the result is there, so that a step that goes on has been reduced on this host.
        """
        if self._sum is None:
            self._sum = HostSum(self.devices, self.process_index)
        self._reach(Place.BEFORE_SUM)
        total = self._sum(tree)
        jax.block_until_ready(total)
        self._link.check()
        return total

    def _reach(self, place: Place) -> None:
        if self._fault_points is not None and self._step is not None:
            self._fault_points.reach(place, self._step)


def _mesh(devices: list[Device], axes: str | Sequence[str] | Mapping[str, int], whose: str) -> Mesh:
    sizes = dict(axes) if isinstance(axes, Mapping) else _names_to_sizes(axes)
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) == 1 and fixed > 0 and len(devices) % fixed == 0:
        sizes[open_axes[0]] = len(devices) // fixed
    if int(np.prod(list(sizes.values()))) != len(devices) or min(sizes.values(), default=0) < 1:
        raise CallerError(
            f"mesh axes {dict(sizes)} do not fit the {len(devices)} devices of {whose}: the sizes must multiply "
            "to that number; write -1 for one of them to have it follow the devices"
        )
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def _names_to_sizes(axes: str | Sequence[str]) -> dict[str, int]:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    return {name: -1 if position == 0 else 1 for position, name in enumerate(names)}
