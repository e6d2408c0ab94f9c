"""What a struct's type demands of its values: keys, types and ranges."""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence

from msgspec import inspect

_PATH_PART = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
"""One part of a path as msgspec writes it: `.name` or `[3]`. A key of a dict is `[...]` and not named."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyMismatch:
    """A key that should not be there (`known_keys` lists the valid ones), or a missing one (`expected` describes
    it).
    """

    key: str
    known_keys: tuple[str, ...] = ()
    expected: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConfigValue:
    """A value in a configuration, and the type it should have."""

    key: str
    value: object
    type_info: inspect.Type


def find_key_mismatches(values: object, info: inspect.Type, prefix: str = "") -> Iterator[KeyMismatch]:
    """Yield each unknown or missing key of `values` and below, unknown ones first.

    A misspelled key is both; the unknown one is more informative.
    """
    info = _inner_type(info, values)
    if isinstance(info, inspect.StructType) and isinstance(values, dict):
        fields = {field.encode_name: field for field in info.fields}
        known = tuple(fields)
        allowed = {*known, info.tag_field}
        yield from (
            KeyMismatch(key=f"{prefix}{key}", known_keys=known) for key in values if key not in allowed
        )
        for name, field in fields.items():
            if name in values:
                yield from find_key_mismatches(values[name], field.type, f"{prefix}{name}.")
            elif field.required:
                yield KeyMismatch(key=f"{prefix}{name}", expected=describe_type(field.type) or "a value")
    elif isinstance(info, inspect.DictType) and isinstance(values, dict):
        for key, value in values.items():
            yield from find_key_mismatches(value, info.value_type, f"{prefix}{key}.")
    elif isinstance(info, inspect.ListType | inspect.VarTupleType) and isinstance(values, list | tuple):
        for index, value in enumerate(values):
            yield from find_key_mismatches(value, info.item_type, f"{prefix.rstrip('.')}[{index}].")


def find_value(path: str, values: object, info: inspect.Type) -> ConfigValue | None:
    """Return the value at a path of a msgspec message, without its `$`; None where the path names no key."""
    parts = list(_PATH_PART.finditer(path))
    if "".join(part.group() for part in parts) != path:
        return None
    for part in parts:
        info = _inner_type(info, values)
        name, index = part.groups()
        if name is not None and isinstance(info, inspect.StructType) and isinstance(values, dict):
            field = next((field for field in info.fields if field.encode_name == name), None)
            if field is None:
                return None
            values, info = values[name], field.type
        elif index is not None and isinstance(info, inspect.ListType | inspect.VarTupleType):
            if not isinstance(values, list | tuple):
                return None
            values, info = values[int(index)], info.item_type
        else:
            return None
    return ConfigValue(key=path.removeprefix("."), value=values, type_info=info)


def describe_type(info: inspect.Type) -> str | None:
    """Describe what a value may be, with its complete range; None where msgspec's own words are as good."""
    match info:
        case inspect.Metadata():
            return describe_type(info.type)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "an integer" + _describe_range(info)
        case inspect.FloatType():
            return "a number" + _describe_range(info)
        case inspect.StrType():
            return "a string" + (f" like {info.pattern}" if info.pattern else "")
        case inspect.LiteralType():
            return "one of " + ", ".join(repr(value) for value in info.values)
        case inspect.EnumType():
            return "one of " + ", ".join(repr(member.value) for member in info.cls)
        case _:
            return _describe_compound_type(info)


def _describe_compound_type(info: inspect.Type) -> str | None:
    match info:
        case inspect.ListType() | inspect.VarTupleType() | inspect.TupleType():
            return "an array"
        case inspect.StructType():
            return "a table with " + ", ".join(field.encode_name for field in info.fields)
        case inspect.DictType():
            return "a table"
        case inspect.UnionType():
            options = [describe_type(t) for t in info.types if not isinstance(t, inspect.NoneType)]
            return " or ".join(option for option in options if option) or None
        case _:
            return None


def suggest_key(name: str, known: Sequence[str]) -> str:
    """Suggest the known key that is closest to an unknown one, or to remove it."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean '{close[0]}'?" if close else "Remove it."


def _describe_range(info: inspect.IntType | inspect.FloatType) -> str:
    bounds = [(">", info.gt), (">=", info.ge), ("<", info.lt), ("<=", info.le)]
    text = " and ".join(f"{sign} {bound:,}".replace(",", "_") for sign, bound in bounds if bound is not None)
    return f" {text}" if text else ""


def _inner_type(info: inspect.Type, values: object) -> inspect.Type:
    """Return the struct, table or array behind metadata and unions; a tagged union is resolved by its tag."""
    if isinstance(info, inspect.Metadata):
        return _inner_type(info.type, values)
    if not isinstance(info, inspect.UnionType):
        return info
    options = [option for option in info.types if not isinstance(option, inspect.NoneType)]
    if len(options) == 1:
        return _inner_type(options[0], values)
    if not isinstance(values, dict):
        return info
    structs = (option for option in options if isinstance(option, inspect.StructType))
    return next((s for s in structs if s.tag_field is not None and values.get(s.tag_field) == s.tag), info)
