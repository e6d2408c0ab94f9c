"""What hosts tell each other in a few numbers each: one small all-reduce, the same program for all of it."""

from typing import Any, Final, Protocol

import numpy as np

from resilient_jax.ids import HostName

ROW_SIZE: Final = 192
"""Numbers of a host: room for an address and a name."""


class HostWorld(Protocol):
    """The attributes and methods of the world that are used here."""

    hosts: tuple[HostName, ...]

    @property
    def host_index(self) -> int:
        """This host's index in `hosts`."""
        ...

    def all_reduce(self, tree: Any) -> Any:  # noqa: ANN401 - a tree of small numpy arrays
        """Return the sum of a tree over all hosts."""
        ...


def gather_rows(world: HostWorld, values: np.ndarray) -> np.ndarray:
    """Return the values of every host, int32[hosts, ROW_SIZE], zeros after the last.

    Args:
        world: world of the hosts, all of which must call this.
        values: values of this host, at most ROW_SIZE whole numbers that int32 can represent.
    """
    # Each host fills in its own row, so the sum over hosts has the rows of all.
    rows = np.zeros((len(world.hosts), ROW_SIZE), np.int32)
    rows[world.host_index, : len(values)] = values
    # As a vector, which `step.accumulation_call` compiles ahead for other numbers of hosts.
    return world.all_reduce(rows.reshape(-1)).reshape(rows.shape)


def gather_texts(world: HostWorld, text: bytes) -> list[str]:
    """Return the text of every host, at most ROW_SIZE bytes of UTF-8 each, in the order of `hosts`."""
    rows = gather_rows(world, np.frombuffer(text, np.uint8))
    return [bytes(row.astype(np.uint8)).rstrip(b"\0").decode() for row in rows]
