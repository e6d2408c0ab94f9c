"""From TOML text to a `TopologyFile`, or one `ConfigError` with key, found, expected, and what to do.

`config` is on the same layer and cannot be imported; this is the part of it that these few tables need, in its wording.
"""

import difflib
import re
import tomllib
from collections.abc import Sequence

import msgspec

from resilient_jax.errors import ConfigError
from resilient_jax.topology.file_format import TABLES, TopologyFile

_REASON = re.compile(r"(?P<reason>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<key>.*)`")
_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_WORDS = {
    "`str | array`": "a string or an array of strings",
    "`float | null`": "a number",
    "`int | null`": "an integer",
    "`float`": "a number",
    "`int`": "an integer",
    "`str`": "a string",
    "`array`": "an array",
    "`object`": "a table",
}
"""msgspec's names of types, in TOML's words."""


def decode_tables(text: str, *, source: str) -> TopologyFile:
    """Return the tables of a topology file, each value of its type and in its range.

    Args:
        text: TOML.
        source: name of the text in messages, usually the file's.

    Raises:
        ConfigError: the text is not TOML, or a table does not fit.
    """
    try:
        values = tomllib.loads(text)
    # Absurd numbers and nesting raise these, too.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source}: found text that is not TOML ({error}), expected TOML 1.0. Correct it at that place."
        ) from error
    try:
        return msgspec.convert(values, TopologyFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_describe(str(error), values)}") from error


def suggest_name(name: str, known: Sequence[str]) -> str:
    """Return a hint that names the known name closest to this one."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else "Correct the name, or remove it."


def _describe(message: str, values: object) -> str:
    match = _REASON.fullmatch(message)
    # The last part of the pattern is optional, and the first matches any string.
    assert match is not None
    reason, path = match["reason"], match["path"] or ""
    if unknown := _UNKNOWN.fullmatch(reason):
        known = TABLES[re.sub(r"\[\d+\]", "", path)].__struct_fields__
        return (
            f"key '{_join(path, unknown['key'])}': found an unknown key, expected one of {', '.join(known)}. "
            f"{suggest_name(unknown['key'], known)}"
        )
    if missing := _MISSING.fullmatch(reason):
        return (
            f"key '{_join(path, missing['key'])}': found nothing, expected this key. Add it; meshes/README.md says "
            "what it means."
        )
    expected = reason.partition(", got ")[0].replace("Expected ", "")
    for name, words in _WORDS.items():
        expected = expected.replace(name, words)
    # A key of a dict, which msgspec does not name.
    if path.endswith("[...]"):
        path, expected = path.removesuffix("[...]"), f"{expected} for each of its keys"
    return f"key '{path}': found {_look_up(path, values)}, expected {expected}. Change the value."


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _look_up(path: str, values: object) -> str:
    """Return the value at one of msgspec's paths, as text with its type."""
    for name, index in _PART.findall(path):
        if isinstance(values, list):
            values = values[int(index)]
        elif isinstance(values, dict):
            values = values[name]
    return f"{values!r} ({type(values).__name__})"
