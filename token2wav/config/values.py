"""Values of configurations and commands: they are converted to typed ones, with messages that name
what is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from token2wav.errors import ConfigError

_LARGEST = sys.float_info.max  # NaN and infinity are beyond it too
_SHOWN_CHARS = 80
_SHOWN_BITS = 4000

_Config = TypeVar("_Config")


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number, as a part of its type: `Annotated[int, Bounds(1, 256)]`.

    Both ends are allowed.
    """

    least: float
    most: float

    def check(self, value: Any, name: str) -> None:
        """Raises ConfigError if a number is out of bounds; `name` is its path for messages."""
        if not self.least <= value <= self.most:
            raise ConfigError(f"{name}: {shown(value)} is not between {self.least} and {self.most}")


@dataclass(frozen=True)
class Length:
    """Bound of the number of items in a list, as a part of its type."""

    most: int

    def check(self, value: Any, name: str) -> None:
        """Raises ConfigError if a list is too long; `name` is its path for messages."""
        if len(value) > self.most:
            raise ConfigError(f"{name}: {len(value)} items; at most {self.most} are allowed")


def from_mapping(cls: type[_Config], data: Any, name: str) -> _Config:
    """Builds dataclass `cls` of a mapping, nested ones included; `name` is its path for messages,
    empty for a file.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{name or 'file'}: expected a mapping, got {type(data).__name__}")
    hints = kinds(cls)
    if unknown := [str(key) for key in data if key not in hints]:
        raise ConfigError(
            f"{name or 'file'}: unknown key {shown(unknown[0])}; known are {', '.join(hints)}"
        )
    values = {}
    for key, value in data.items():
        path = f"{name}.{key}" if name else key
        nested = dataclasses.is_dataclass(hints[key])
        values[key] = (
            from_mapping(hints[key], value, path) if nested else convert(value, hints[key], path)
        )
    return cls(**values)


def kinds(config: type) -> Mapping[str, Any]:
    """Returns the types of a dataclass's fields, with their bounds."""
    return get_type_hints(config, include_extras=True)


def check_bounds(config: Any, name: str) -> None:
    """Raises ConfigError if a field of a dataclass is out of the bounds in its type; `name` is its
    path for messages.

    `convert` has checked values of files before. This checks configurations that are made in code.
    """
    for item in dataclasses.fields(config):
        _check_value(
            getattr(config, item.name), kinds(type(config))[item.name], f"{name}.{item.name}"
        )


def _check_value(value: Any, kind: Any, name: str) -> None:
    if get_origin(kind) is Annotated:
        kind, *bounds = get_args(kind)
        for bound in bounds if value is not None else ():
            bound.check(value, name)
    if get_origin(kind) is tuple:
        for index, item in enumerate(value):
            _check_value(item, get_args(kind)[0], f"{name}[{index}]")


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Puts a prefix before the messages of configuration errors, unless they begin with it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(prefix + str(error).removeprefix(prefix)) from error


def convert(value: Any, kind: Any, name: str) -> Any:
    """Converts a value to int, float, bool, str, Literal, tuples or mappings of them; whole floats
    pass as integers.

    A kind may allow None, and may have bounds.
    """
    if get_origin(kind) is Annotated:
        kind, *bounds = get_args(kind)
        converted = convert(value, kind, name)
        for bound in bounds if converted is not None else ():
            bound.check(converted, name)
        return converted
    if get_origin(kind) is UnionType:
        if value is None:
            return None
        [kind] = [one for one in get_args(kind) if one is not NoneType]
    if get_origin(kind) is Literal:
        if value in (allowed := get_args(kind)):
            return value
        raise ConfigError(f"{name}: {shown(value)} is not one of {', '.join(allowed)}")
    if get_origin(kind) is tuple:
        if isinstance(value, list):
            return tuple(
                convert(item, get_args(kind)[0], f"{name}[{i}]") for i, item in enumerate(value)
            )
        raise ConfigError(f"{name}: expected a list, got {type(value).__name__}")
    if get_origin(kind) is dict:
        if isinstance(value, dict):
            return {
                key: convert(item, get_args(kind)[1], f"{name}.{key}")
                for key, item in value.items()
            }
        raise ConfigError(f"{name}: expected a mapping, got {type(value).__name__}")
    numeric = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST
    )
    if kind is int and numeric and value == int(value):
        return int(value)
    if kind is float and numeric:
        return float(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return value
    raise ConfigError(f"{name}: expected {kind.__name__}, got {shown(value)}")


def shown(value: Any) -> str:
    """Formats a value for a message: on one line, and short whatever it is."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        # Python refuses to write the longest ones in decimal
        return f"an integer of {value.bit_length()} bits"
    text = (
        repr(value)
        if isinstance(value, (int, float, str, bool, type(None)))
        else type(value).__name__
    )
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def number(
    kind: type[int] | type[float], least: int = 0, most: int = 0, name: str = ""
) -> Callable[[str], Any]:
    """Makes a converter of arguments for `argparse`, which takes finite numbers within bounds.

    Args:
        kind: int or float.
        least: smallest number.
        most: largest number; 0 for any.
        name: what such a number is called in messages.
    """

    def converted(text: str) -> int | float:
        try:
            value = kind(text) if kind is float or text.isdecimal() else math.nan
        except ValueError:
            value = math.nan
        if not least <= value <= (most or _LARGEST):
            bounds = f"from {least} to {most}" if most else f"of at least {least}"
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {name or ('an integer' if kind is int else 'a number')} {bounds}"
            )
        return value

    return converted
