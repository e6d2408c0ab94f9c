"""The copy of a state that is written while training goes on."""

import mmap
import os
from typing import Any

import jax
import numpy as np

from resilient_jax.errors import StateError
from resilient_jax.training.trainer.state import is_key
from resilient_jax.training.trainer.storage.leaves import Leaf, Tree, allocate, flatten, lay_out, view


class HostCopy:
    """Memory of ours with the numbers of a state in it; whoever has its descriptor can map it.

    It is kept from copy to copy: the first touch of fresh memory costs more than the copy itself.
    """

    def __init__(self) -> None:
        self._memory: tuple[int, mmap.mmap] | None = None

    def take(self, state: Tree) -> tuple[list[Leaf], int]:
        """Copies a state over the last one; gives where its leaves lie, and the descriptor, which stays ours.

        Args:
            state: arrays that are whole on one of this process's devices; numbers.

        Raises:
            StateError: there is only a piece of an array here.
        """
        flat = [(path, _whole_here(leaf)) for path, leaf in flatten(state)]
        for _, leaf in flat:
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        leaves, nbytes = lay_out(flat)
        descriptor, memory = self._provide(nbytes)
        for leaf, (_, array) in zip(leaves, flat, strict=True):
            if not leaf.empty:
                np.copyto(view(leaf, memory), np.asarray(array))
        return leaves, descriptor

    def free(self) -> None:
        """Gives the memory back, as soon as the other process has, too."""
        if self._memory is not None:
            os.close(self._memory[0])
            self._memory = None  # unmapped with the last array on it

    def _provide(self, nbytes: int) -> tuple[int, mmap.mmap]:
        if self._memory is not None and len(self._memory[1]) < nbytes:
            self.free()
        if self._memory is None:
            descriptor = allocate(nbytes)
            self._memory = descriptor, mmap.mmap(descriptor, 0)
        return self._memory


def _whole_here(leaf: Any) -> Any:  # noqa: ANN401 - an array, a number, or an empty container
    """A whole copy of an array, on one device of this process."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf) if isinstance(leaf, int | float | complex) else leaf
    array = jax.random.key_data(leaf) if is_key(leaf) else leaf
    copy = array.addressable_shards[0].data
    if copy.shape != array.shape:
        raise StateError(
            f"a checkpoint was asked for of a state with a piece of an array here ({array.sharding}), expected all of "
            "it; gather it first"
        )
    return copy
