"""TOML text to a frozen struct, or one `ConfigError` that names the key that does not fit.

Each message has the same parts in the same order: source, key (dotted), found, expected, what to do.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from resilient_jax.config.struct_schema import describe_type, find_key_mismatches, find_value, suggest_key
from resilient_jax.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def load_toml(path: str | Path, type_: type[T]) -> T:
    """Return the configuration in a TOML file.

    Args:
        type_: frozen struct to decode into; its `msgspec.Meta` constraints are checked.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or does not fit `type_`.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: found no such file, expected a TOML file. "
            f"Check the path; it was looked for from {Path.cwd()}."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path}: found a path that cannot be read ({error.strerror}), expected a TOML file. "
            "Check the path and its permissions."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: found a byte that is not UTF-8 at offset {error.start}, expected a TOML file. "
            "Save the file as UTF-8."
        ) from error
    return decode_toml(text, type_, source=str(path))


def decode_toml(text: str, type_: type[T], *, source: str) -> T:
    """Return the configuration in a TOML string.

    Args:
        text: text in TOML 1.0 (https://toml.io/en/v1.0.0).
        type_: frozen struct to decode into.
        source: the name of the text in messages, usually a file name.

    Raises:
        ConfigError: the text is not TOML, or does not fit `type_`.

    Example:
        >>> import msgspec
        >>> class Model(msgspec.Struct, frozen=True, kw_only=True):
        ...     layers: int
        >>> decode_toml("layers = 4", Model, source="model.toml")
        Model(layers=4)
    """
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers too long and nesting too deep
        raise ConfigError(
            f"{source}: found text that is not TOML ({error}), expected TOML 1.0. Correct it at that place."
        ) from error
    return _convert(values, type_, source)


def override_values(config: T, changes: Mapping[str, object], *, source: str) -> T:
    """Return `config` with some values changed, checked as if they had stood in the file.

    Args:
        config: configuration with the other values.
        changes: new values by the name of their top-level key.
        source: the name of the changes in messages, such as "command line".

    Raises:
        ConfigError: a changed value does not fit.
    """
    return _convert({**msgspec.to_builtins(config), **changes}, type(config), source)


def _convert(values: dict[str, object], type_: type[T], source: str) -> T:
    _check_keys(values, type_, source)
    try:
        return msgspec.convert(values, type_)
    except msgspec.ValidationError as error:
        raise ConfigError(_describe_misfit(str(error), values, type_, source)) from error


def _check_keys(values: dict[str, object], type_: type[msgspec.Struct], source: str) -> None:
    """Raise `ConfigError` for unknown and missing keys at any depth, also where a struct does not forbid them
    itself.
    """
    for misfit in find_key_mismatches(values, msgspec.inspect.type_info(type_)):
        if misfit.expected is not None:
            raise ConfigError(
                f"{source}: key '{misfit.key}': found nothing, expected {misfit.expected}. Add the key."
            )
        name = misfit.key.rpartition(".")[2]
        raise ConfigError(
            f"{source}: key '{misfit.key}': found an unknown key, expected one of "
            f"{', '.join(misfit.known_keys)}. {suggest_key(name, misfit.known_keys)}"
        )


def _describe_misfit(reason: str, values: object, type_: type[msgspec.Struct], source: str) -> str:
    """Return the message for a value of the wrong type or out of range.

    msgspec names neither the value nor the complete range, so both are looked up by the path in its message.
    """
    reason, _, path = reason.partition(" - at `$")
    place = find_value(path.rstrip("`"), values, msgspec.inspect.type_info(type_))
    if place is None or (expected := describe_type(place.type_info)) is None:
        key = path.strip("`.")
        return f"{source}: {f'key {key!r}: ' if key else ''}{reason}. Correct the value."
    if not reason.startswith(("Expected", "Invalid")):  # a rule of the struct itself, from its __post_init__
        where = f"key '{place.key}': " if place.key else ""
        return f"{source}: {where}found values that do not go together: {reason}."
    return (
        f"{source}: key '{place.key}': found {place.value!r} ({type(place.value).__name__}), "
        f"expected {expected}. Change the value."
    )
