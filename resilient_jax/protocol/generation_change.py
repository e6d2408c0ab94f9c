"""What is different in a generation from the one before it, so that each host need not read all of it.

A generation names every member: of some thousand hosts it is some hundred kilobytes, which each of them would read in
each phase. So the leader writes the change beside the record, and agents apply it to what they have. A digest of the
base and of the result tells an agent that it has missed a change; it then reads the record.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from resilient_jax.protocol.records import Generation

SMALL_RECORD_BYTES: Final = 2048
"""A record of at most so many bytes is its own change: to read it costs no more than to look for what is different."""
_DIGEST_BYTES: Final = 16


class KeptItems(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Items of the list in the base, in its order.

    Attributes:
        start: the index of the first.
        count: how many.
    """

    start: int
    count: int


class AddedItems(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Items that are not in the base, or there in another order."""

    items: list[Any]


ListPart = KeptItems | AddedItems


class GenerationChange(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between two generations.

    Attributes:
        base: the digest of the generation before; empty: `values` has all fields, or none.
        digest: the digest of this one.
        values: the fields that have other values, as msgpack has them. No field at all: the record must be read.
        lists: the fields that are lists with other items, as parts of the list in the base and new items.
    """

    base: bytes
    digest: bytes
    values: dict[str, Any]
    lists: dict[str, list[ListPart]]


def digest_record(record: bytes) -> bytes:
    """Return the digest of a generation's record, as the store has it."""
    return hashlib.blake2b(record, digest_size=_DIGEST_BYTES).digest()


def describe_change(before: Generation | None, after: Generation) -> GenerationChange:
    """Return the difference of two generations, or what a host does without one."""
    record = msgspec.msgpack.encode(after)
    digest = digest_record(record)
    if len(record) <= SMALL_RECORD_BYTES:
        values = msgspec.to_builtins(after, builtin_types=(bytes,))
        return GenerationChange(base=b"", digest=digest, values=values, lists={})
    values, lists = _compare(before, after) if before is not None else ({}, {})
    base = digest_record(msgspec.msgpack.encode(before)) if before is not None else b""
    change = GenerationChange(base=base, digest=digest, values=values, lists=lists)
    if not base or len(msgspec.msgpack.encode(change)) > len(record) // 2:
        return GenerationChange(base=b"", digest=digest, values={}, lists={})
    return change


def _compare(before: Generation, after: Generation) -> tuple[dict[str, Any], dict[str, list[ListPart]]]:
    values: dict[str, Any] = {}
    lists: dict[str, list[ListPart]] = {}
    for name in Generation.__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if old is new or old == new:
            continue
        if isinstance(new, tuple):
            lists[name] = _split(_to_list(old), _to_list(new))
        else:
            values[name] = msgspec.to_builtins(new, builtin_types=(bytes,))
    return values, lists


def _to_list(items: "Sequence[Any]") -> list[Any]:
    return msgspec.to_builtins(items, builtin_types=(bytes,))


def _split(old: list[Any], new: list[Any]) -> list[ListPart]:
    """Return `new` as runs of `old` and other items."""
    places = {msgspec.msgpack.encode(item): place for place, item in enumerate(old)}
    parts: list[ListPart] = []
    for item in new:
        place = places.get(msgspec.msgpack.encode(item))
        last = parts[-1] if parts else None
        if place is None:
            if isinstance(last, AddedItems):
                last.items.append(item)
            else:
                parts.append(AddedItems(items=[item]))
        elif isinstance(last, KeptItems) and last.start + last.count == place:
            parts[-1] = KeptItems(start=last.start, count=last.count + 1)
        else:
            parts.append(KeptItems(start=place, count=1))
    return parts


def apply_change(known: Generation | None, change: GenerationChange) -> Generation | None:
    """Return the generation after a change; None if it must be read from its record.

    Args:
        known: the newest generation that the host has.
        change: the change.
    """
    if not change.base:
        values: dict[str, Any] = change.values
    elif known is None or digest_record(msgspec.msgpack.encode(known)) != change.base:
        return None
    else:
        values = {
            name: change.values.get(name, getattr(known, name)) for name in Generation.__struct_fields__
        }
        for name, parts in change.lists.items():
            values[name] = _join(_to_list(getattr(known, name)), parts)
        values = msgspec.to_builtins(values, builtin_types=(bytes,))
    try:
        after = msgspec.convert(values, Generation, builtin_types=(bytes,))
    except msgspec.ValidationError:
        return None
    return after if digest_record(msgspec.msgpack.encode(after)) == change.digest else None


def _join(old: list[Any], parts: list[ListPart]) -> list[Any]:
    joined: list[Any] = []
    for part in parts:
        joined += part.items if isinstance(part, AddedItems) else old[part.start : part.start + part.count]
    return joined
