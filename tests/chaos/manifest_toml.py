"""Formats manifests as TOML, so that a campaign that was drawn or shrunk can be loaded and run again."""

import json
from collections.abc import Mapping

import msgspec

from tests.chaos.manifest import CampaignManifest, Incident


def format_manifest(manifest: CampaignManifest) -> str:
    """Return the string that `parse_manifest` parses as the same manifest, without default values.

    Example:
        >>> print(format_manifest(CampaignManifest(seed=7)), end="")
        seed = 7
    """
    top = _changed(manifest, CampaignManifest())
    lines = [f"{key} = {_value(value)}" for key, value in top.items() if key not in TABLES]
    for key in ("job", "expected_exit"):
        if key in top:
            lines += ["", f"[{key}]"]
            lines += [f"{name} = {_value(value)}" for name, value in top[key].items()]
    for incident in manifest.incidents:
        lines += ["", "[[incidents]]"]
        lines += [f"{name} = {_value(value)}" for name, value in _of_incident(incident).items()]
    return "\n".join(lines) + "\n"


def format_table(values: Mapping[str, object]) -> str:
    """Return keys and values as the top level of a TOML file."""
    return "".join(f"{_key(name)} = {_value(value)}\n" for name, value in values.items())


TABLES = ("job", "expected_exit", "incidents")


def _changed(struct: msgspec.Struct, default: msgspec.Struct) -> dict:
    found = {}
    for name in struct.__struct_fields__:
        value, usual = getattr(struct, name), getattr(default, name)
        if value == usual:
            continue
        is_table = isinstance(value, msgspec.Struct) and isinstance(usual, msgspec.Struct)
        found[name] = _changed(value, usual) if is_table else msgspec.to_builtins(value)
    return found


def _of_incident(incident: Incident) -> dict:
    built = msgspec.to_builtins(incident)
    built["trigger"] = {name: v for name, v in built["trigger"].items() if v is not None and v != {}}
    built["fault"] = {name: v for name, v in built["fault"].items() if v is not None and v != ""}
    if not built["overlaps"]:
        del built["overlaps"]
    for name in ("required_events", "forbidden_events"):
        if not built[name]:
            del built[name]
    return built


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            return "{ " + ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case str():
            # JSON's escapes are TOML's, but for the delete character, which JSON leaves as it is.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case _:
            raise TypeError(f"no TOML for {value!r}")


def _key(name: str) -> str:
    is_bare = name and all(c.isascii() and (c.isalnum() or c in "_-") for c in name)
    return name if is_bare else _value(name)
