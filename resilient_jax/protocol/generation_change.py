"""What is different in a generation from the one before it, so that each host need not read all of it.

A generation names every member: of some thousand hosts it is some hundred kilobytes, which each of them would read in
each phase. So the leader writes the change beside the record, and agents apply it to what they have. A digest of the
base and of the result tells an agent that it has missed a change; it then reads the record. Where all is new the change
is the record, compressed: members are much alike, so that it has a fraction of the size.
"""

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from resilient_jax.errors import MessageError
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.protocol.record_parts import change_fields, find_types, read_field

SMALL_RECORD_BYTES: Final = 2048
"""A record of at most so many bytes is its own change: to read it costs no more than to look for what is different."""
MAX_PACKED_BYTES: Final = 128 * 1024
"""Of a compressed record beside the record, in one transaction. A larger one is not sent: hosts read the record."""
MAX_RECORD_BYTES: Final = 4 * 1024 * 1024
"""Of what a compressed record may become."""
_COMPRESSION_LEVEL: Final = 1
_DIGEST_BYTES: Final = 16
_DECODER: Final = msgspec.msgpack.Decoder(Generation)


class KeptItems(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Items of the list in the base, in its order.

    Attributes:
        start: index of the first item.
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
        base: digest of the generation before; empty: `packed` has all.
        digest: digest of the generation after the change.
        values: fields that have other values, as msgpack has them, also those of parts.
        lists: fields that are lists with other items, as parts of the list in the base and new items.
        packed: record of the generation, compressed; empty without a base: then the record must be read from the store.
    """

    base: bytes
    digest: bytes
    values: dict[str, Any] = msgspec.field(default_factory=dict)
    lists: dict[str, list[ListPart]] = msgspec.field(default_factory=dict)
    packed: bytes = b""


def digest_record(record: bytes) -> bytes:
    """Return the digest of a generation's record, as the store has it."""
    return hashlib.blake2b(record, digest_size=_DIGEST_BYTES).digest()


def describe_change(before: Generation | None, after: Generation) -> GenerationChange:
    """Return the difference of two generations, or all of the second, whichever is smaller."""
    record = msgspec.msgpack.encode(after)
    digest = digest_record(record)
    packed = zlib.compress(record, _COMPRESSION_LEVEL)
    whole = GenerationChange(
        base=b"", digest=digest, packed=packed if len(packed) <= MAX_PACKED_BYTES else b""
    )
    if before is None or len(record) <= SMALL_RECORD_BYTES:
        return whole
    values, lists = _compare(before, after)
    base = digest_record(msgspec.msgpack.encode(before))
    change = GenerationChange(base=base, digest=digest, values=values, lists=lists)
    return change if len(msgspec.msgpack.encode(change)) <= len(packed) else whole


def _compare(before: Generation, after: Generation) -> tuple[dict[str, Any], dict[str, list[ListPart]]]:
    values: dict[str, Any] = {}
    lists: dict[str, list[ListPart]] = {}
    for name in find_types(Generation):
        old, new = read_field(before, name), read_field(after, name)
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
        known: newest generation that the host has; None: none.
    """
    if not change.base:
        return _unpack(change)
    if known is None or digest_record(msgspec.msgpack.encode(known)) != change.base:
        return None
    lists = {name: _join(_to_list(read_field(known, name)), parts) for name, parts in change.lists.items()}
    types = find_types(Generation)
    try:
        values = {
            name: msgspec.convert(value, types[name], builtin_types=(bytes,))
            for name, value in (change.values | lists).items()
        }
    except msgspec.ValidationError:
        return None
    after = change_fields(known, **values)
    return after if digest_record(msgspec.msgpack.encode(after)) == change.digest else None


def _unpack(change: GenerationChange) -> Generation | None:
    """Return the generation in a change that has all of it; None if it is not there, or damaged."""
    try:
        record = zlib.decompressobj().decompress(change.packed, MAX_RECORD_BYTES)
        if digest_record(record) != change.digest:
            return None
        return decode_message(_DECODER, record, "a generation in a change")
    except (zlib.error, MessageError):
        return None


def _join(old: list[Any], parts: list[ListPart]) -> list[Any]:
    joined: list[Any] = []
    for part in parts:
        joined += part.items if isinstance(part, AddedItems) else old[part.start : part.start + part.count]
    return joined
