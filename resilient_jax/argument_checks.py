"""Checks of arguments before they are used: an error from deep inside would not say which argument was wrong.

The fields of a group of options are checked against their annotations, so there is no second list of types. Whether a
function takes the arguments that it will be called with is read off its signature; it is not called.
"""

import dataclasses
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, Final, Literal, TypeVar, Union

from resilient_jax.errors import CallerError

_T = TypeVar("_T")

NAMES: Final[Mapping[object, str]] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    types.NoneType: "None",
    Callable: "a function",
}
"""What a type is called in an error, where it is not its own name."""


def check_fields(options: Any) -> None:  # noqa: ANN401 - any dataclass
    """Check that each field of a group of options has a value of its annotated type; for `__post_init__`.

    Raises:
        CallerError: a field has a value of another type; the message names the first such field.
    """
    annotations = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value, annotation = getattr(options, field.name), annotations[field.name]
        if not _has_type(value, annotation):
            raise CallerError(
                f"{type(options).__name__}: found {field.name}={describe_value(value)}, expected "
                f"{_describe_type(annotation)}"
            )


def refuse_unknown_options(cls: type[_T]) -> type[_T]:
    """Return the class with a constructor that refuses unknown options, and options without a name, in our words.

    Python's own TypeError names neither the option that was meant nor the first of the positional values.
    """
    initialize = cls.__init__
    names = [name for name in inspect.signature(initialize).parameters if name != "self"]

    @functools.wraps(initialize)
    def check_and_initialize(self: _T, *args: object, **options: object) -> None:
        if args:
            raise CallerError(
                f"{cls.__name__}: found {describe_value(args[0])} without a name, expected every option by its name: "
                f"{cls.__name__}({names[0]}=...)"
            )
        for name in options:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
                meant = f"Did you mean {close[0]}?" if close else "Remove it."
                raise CallerError(
                    f"{cls.__name__}: found no option {name}, expected some of: {', '.join(names)}. {meant}"
                )
        initialize(self, **options)

    cls.__init__ = check_and_initialize
    return cls


def find_refused_call(function: Callable[..., object], num_arguments: int) -> str | None:
    """Return the signature of a function that cannot be called with that many positional arguments; else None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that has none
        return None
    try:
        signature.bind(*range(num_arguments))
    except TypeError:
        return str(signature)
    return None


def describe_value(value: object) -> str:
    """Return a short name of a wrong value: 'ten' (str), the class Adam, the function adam."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', value)}"
    if value is None or isinstance(value, str | int | float):
        return f"{value!r} ({type(value).__name__})"
    return f"a {type(value).__name__}"


def _has_type(value: object, annotation: Any) -> bool:  # noqa: ANN401 - a type or a form of typing
    origin, choices = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_has_type(value, choice) for choice in choices)
    if origin is Literal:
        return value in choices
    if annotation is Any:
        return True
    expected = origin or annotation
    if isinstance(value, bool):
        return expected is bool
    return isinstance(value, {int: Integral, float: Real}.get(expected, expected))


def _describe_type(annotation: Any) -> str:  # noqa: ANN401 - a type or a form of typing
    origin, choices = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(choice) for choice in choices)
    if origin is Literal:
        return " or ".join(map(repr, choices))
    expected = origin or annotation
    return NAMES.get(expected) or expected.__name__
