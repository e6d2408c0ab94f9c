"""What all hosts have found together in a step, kept for hosts that a failure kept from learning it.

A state in shards is updated by each host alone, once it has the sums of its shards and what all hosts added up: the
loss, norms, what `World.all_reduce` gave. If a failure meets the hosts just then, some have committed the step and
others lack the last of those numbers. They cannot ask for the newer state, since their shards may be on them alone. So
they get the numbers from a host that has committed, and run the step again without computing or adding up anything.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.errors import PeerUnreachable
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.state.flat_state import FlatLeaf, FlatState
from resilient_jax.state.peer_transfer import StateOffer

RESULTS_NUMBER: Final = -1
"""Of an offer; those of states count from 0."""
REDUCED: Final = ""
"""The name of what `World.all_reduce` gave."""
COMMITTED: Final = "\n"
"""The name that stands where the step was committed."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What one call gave all hosts.

    Attributes:
        name: `REDUCED`, or which accumulation it was.
        arrays: arrays that every host has, in order.
    """

    name: str
    arrays: tuple[Any, ...]


class StepResults:
    """The results of the step under way and of the one before it, in the order of the calls."""

    def __init__(self) -> None:
        self._by_step: dict[int | None, list[StepResult]] = {}
        self._step: int | None = None

    @property
    def is_step_begun(self) -> bool:
        """Whether a step of this generation has begun."""
        return self._step is not None

    def begin(self) -> None:
        """Keep from now on what is found before the first step."""
        self._by_step.pop(None, None)
        self._step = None

    def begin_step(self, step: int) -> None:
        """Keep from now on what is found in this step."""
        self._step = step
        kept = {one: found for one, found in self._by_step.items() if one is None or one == step - 1}
        self._by_step = {**kept, step: []}

    def add(self, name: str, arrays: Sequence[Any]) -> None:
        """Keep what a call gave; the arrays are not copied, and may be donated when the step is committed."""
        # All hosts have begun the step that has a result, and so committed the one before it.
        if self._step is not None and not self._by_step.get(self._step):
            self._by_step.pop(self._step - 1, None)
        self._by_step.setdefault(self._step, []).append(StepResult(name, tuple(arrays)))

    def move_to_host(self) -> None:
        """Copy what is on devices to host memory, before the devices' backend is destroyed."""
        self._by_step = {
            step: [StepResult(result.name, tuple(map(_copy, result.arrays))) for result in found]
            for step, found in self._by_step.items()
            if not any(map(_is_gone, _list_arrays(found)))
        }

    def clear(self) -> None:
        """Drop everything."""
        self._by_step.clear()

    def offer(self, host: HostName, generation: GenerationNumber, step: int) -> StateOffer:
        """Return what this host has of a step, to be read by others: all of it or, if some is gone, nothing."""
        found = self._by_step.get(step, [])
        if any(map(_is_gone, _list_arrays(found))):
            found = []
        leaves = [
            FlatLeaf(path=f"{number}.{place}", value=_copy(array))
            for number, result in enumerate(found)
            for place, array in enumerate(result.arrays)
        ]
        names = {str(number): result.name for number, result in enumerate(found)}
        return StateOffer.of_state(
            host, generation, FlatState(step=step, leaves=tuple(leaves), strings=names)
        )

    def make_repeated(self, found: FlatState) -> "RepeatedResults":
        """Return the results for a step that is run again: of the step those that were read from another host."""
        arrays: dict[str, list[np.ndarray]] = {number: [] for number in found.strings}
        for leaf in found.leaves:
            arrays[leaf.path.split(".")[0]].append(np.asarray(leaf.value))
        of_step = [
            StepResult(found.strings[number], tuple(arrays[number])) for number in sorted(arrays, key=int)
        ]
        self._by_step[found.step] = of_step
        return RepeatedResults(self._by_step.get(None, ()), of_step)


class RepeatedResults:
    """The results that a host's calls get while it runs a step again that others have committed."""

    def __init__(self, before: Sequence[StepResult], of_step: Sequence[StepResult]) -> None:
        self._before, self._of_step = deque(before), deque(of_step)
        self.is_step_begun = False

    def require_all_taken(self) -> None:
        """Check, at the commit, that the step has made all calls that it made where it was committed before.

        Raises:
            PeerUnreachable: one is missing, so that the others may have had results of different calls.
        """
        if self._of_step and self._of_step[0].name != COMMITTED:
            raise _miss("commit")

    def take_sum(self, name: str) -> tuple[Any, ...]:
        """Return what an accumulation gave.

        Raises:
            PeerUnreachable: the others have left no such accumulation.
        """
        while self._of_step:
            result = self._of_step.popleft()
            if result.name == name:
                return result.arrays
        raise _miss(f"accumulation {name!r}")

    def take_reduced(self, like: Sequence[Any]) -> tuple[Any, ...]:
        """Return what the next all-reduce gave, of arrays like these.

        Raises:
            PeerUnreachable: the others had an accumulation there, or other shapes.
        """
        results = self._of_step if self.is_step_begun else self._before
        result = results.popleft() if results else None
        if result is None or result.name != REDUCED or _describe(result.arrays) != _describe(like):
            raise _miss(f"all_reduce of {_describe(like)}")
        return result.arrays


def _list_arrays(found: Sequence[StepResult]) -> list[Any]:
    return [array for result in found for array in result.arrays]


def _copy(array: Any) -> np.ndarray:  # noqa: ANN401 - as below
    is_elsewhere_too = isinstance(array, jax.Array) and not array.is_fully_addressable
    # `np.asarray` would be a view of a buffer that the backend owns.
    return np.array(array.addressable_data(0) if is_elsewhere_too else array)


def _is_gone(array: Any) -> bool:  # noqa: ANN401 - of JAX or NumPy
    """Return whether an array was donated, or is on a mesh on which this host, left over, has nothing."""
    return isinstance(array, jax.Array) and (array.is_deleted() or not array.sharding.addressable_devices)


def _describe(arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    # As they are summed: of 64 bits, and of Python's numbers, JAX keeps 32.
    return [(np.shape(array), jnp.result_type(array).name) for array in arrays]


def _miss(what: str) -> PeerUnreachable:
    return PeerUnreachable(
        f"a step that others have committed is run again: found no result of its {what} on them, expected the calls in "
        "the order that they have there"
    )
