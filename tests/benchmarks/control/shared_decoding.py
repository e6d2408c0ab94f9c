"""Generations are decoded once for all simulated agents of a process: real agents do that on machines of their own."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Final, TypeVar
from unittest import mock

import msgspec

from resilient_jax.cluster import generation_follower
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.generation_change import GenerationChange
from resilient_jax.store.interface import KeyValue

MAX_KEPT: Final = 64

ResultT = TypeVar("ResultT")
RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class _Memory:
    """The newest results of some functions, by the arguments, which are kept with them."""

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[object, object]] = {}

    def find_or_make(self, key: Hashable, kept: object, make: Callable[[], ResultT]) -> ResultT:
        """Return what `make` has returned for this key; `kept` lives as long as the result."""
        if key not in self._results:
            self._results[key] = (kept, make())
            if len(self._results) > MAX_KEPT:
                del self._results[next(iter(self._results))]
        return self._results[key][1]  # pyright: ignore[reportReturnType] - what `make` returned for the same key


@contextlib.contextmanager
def share_decoding() -> Iterator[None]:
    """Have all readers of generations in this process share what one has decoded."""
    memory = _Memory()
    decode_record, apply_change = generation_follower.decode_record, generation_follower.apply_change

    def decode_once(record: KeyValue, record_type: type[RecordT]) -> RecordT:
        key = (record.key, record.mod_revision, record_type)
        return memory.find_or_make(key, record, lambda: decode_record(record, record_type))

    def apply_change_once(known: Generation | None, change: GenerationChange) -> Generation | None:
        key = (id(known), id(change))
        return memory.find_or_make(key, (known, change), lambda: apply_change(known, change))

    with (
        mock.patch.object(generation_follower, "decode_record", decode_once),
        mock.patch.object(generation_follower, "apply_change", apply_change_once),
    ):
        yield
