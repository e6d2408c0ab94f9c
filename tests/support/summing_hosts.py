"""Hosts on threads of one process whose all-reduce is a sum, for what hosts tell each other."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np

from resilient_jax.host_exchange import SMALL_BYTES, CollectiveExchange
from resilient_jax.host_exchange.collective_exchange import pack_row
from tests.support.patience import patience

ResultT = TypeVar("ResultT")


class SummingHosts:
    """Some hosts, of which all must call each all-reduce; `sizes` are those of the vectors that were added up."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sizes: list[int] = []
        self._given: dict[int, np.ndarray] = {}
        self._total: np.ndarray = np.zeros(0, np.int32)
        self._barrier = threading.Barrier(count, action=self._add_up)

    def run(self, call: Callable[[CollectiveExchange], ResultT]) -> list[ResultT]:
        """Return what each host's call returns; if one raises, the others' all-reduce fails."""
        with ThreadPoolExecutor(self.count) as threads:
            found = [threads.submit(self._call, call, host) for host in range(self.count)]
            return [one.result(patience(6)) for one in found]

    def _call(self, call: Callable[[CollectiveExchange], ResultT], host: int) -> ResultT:
        def all_reduce(vector: np.ndarray) -> np.ndarray:
            self._given[host] = np.array(vector)
            self._barrier.wait(patience(3))
            return self._total

        try:
            return call(CollectiveExchange(host, self.count, all_reduce))
        except BaseException:
            self._barrier.abort()
            raise

    def _add_up(self) -> None:
        self._total = np.asarray(np.sum(list(self._given.values()), axis=0, dtype=np.int32))
        self.sizes.append(self._total.size)
        self._given.clear()


def add_messages(
    vector: np.ndarray, others: Sequence[tuple[int, object]], room_bytes: int = SMALL_BYTES
) -> np.ndarray:
    """Return the sum of a host's vector and those of others, each with the number of its row and its message."""
    total = np.array(vector)
    for number, message in others:
        row = pack_row(msgspec.msgpack.encode(message), room_bytes)
        total[number * row.size :][: row.size] += row
    return total
