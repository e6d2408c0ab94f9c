"""Records in parts: each part has the fields that belong together, and the name of what they are about.

A record is read by part (`generation.state.step`). It is changed by field: no name occurs twice in a record and its
parts, so that `change_fields(generation, step=3, reason="...")` says all that is new, whichever part has it.
"""

import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec


class RecordPart(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a record that belong together."""


RecordT = TypeVar("RecordT", bound=msgspec.Struct)


@functools.cache
def find_parts(record_type: type[msgspec.Struct]) -> Mapping[str, str]:
    """Return the part of each field that a record has in its parts: names of fields by names of fields."""
    parts: dict[str, str] = {}
    for field in msgspec.structs.fields(record_type):
        if isinstance(field.type, type) and issubclass(field.type, RecordPart):
            names = field.type.__struct_fields__
            twice = set(names) & {*parts, *record_type.__struct_fields__}
            assert not twice, f"{record_type.__name__} has two fields of the names {twice}"
            parts |= dict.fromkeys(names, field.name)
    return parts


def change_fields(record: RecordT, /, **changes: object) -> RecordT:
    """Return a record with other values of some fields, its own and those of its parts."""
    own: dict[str, Any] = dict(changes)
    by_part = defaultdict[str, dict[str, object]](dict)
    for name, part in find_parts(type(record)).items():
        if name in changes:
            by_part[part][name] = own.pop(name)
    for part, values in by_part.items():
        own[part] = msgspec.structs.replace(own[part] if part in own else getattr(record, part), **values)
    return msgspec.structs.replace(record, **own)


@functools.cache
def find_types(record_type: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return the type of each field of a record and of its parts, by name; parts themselves are none of them."""
    types: dict[str, Any] = {}
    for field in msgspec.structs.fields(record_type):
        is_part = isinstance(field.type, type) and issubclass(field.type, RecordPart)
        types |= find_types(field.type) if is_part else {field.name: field.type}
    return types


def read_field(record: msgspec.Struct, name: str) -> Any:  # noqa: ANN401 - of any type
    """Return the value of a field of a record, or of one of its parts."""
    part = find_parts(type(record)).get(name)
    return getattr(record if part is None else getattr(record, part), name)
