"""Values of configurations and commands: conversion to their types, with checks of their bounds."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from token2wav.errors import ConfigError

_LARGEST = sys.float_info.max  # comparison with it also excludes NaN and infinity
_SHOWN_CHARS = 80
_SHOWN_BITS = 4000

_Config = TypeVar("_Config")


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number, in the annotation of its type: `Annotated[int, Bounds(1, 256)]`.

    Both bounds are allowed values.
    """

    least: float
    most: float

    def check(self, value: Any, name: str) -> None:
        """Raises ConfigError if a number is out of bounds; `name` is its key path for messages."""
        if not self.least <= value <= self.most:
            raise ConfigError(f"{name}: {shown(value)} is not between {self.least} and {self.most}")


@dataclass(frozen=True)
class Length:
    """Largest and least number of items in a list, in the annotation of its type."""

    most: int
    least: int = 0

    def check(self, value: Any, name: str) -> None:
        """Raises ConfigError if a list is too long or short; `name` is its key path."""
        if len(value) > self.most:
            raise ConfigError(f"{name}: {len(value)} items; at most {self.most} are allowed")
        if len(value) < self.least:
            count = f"{len(value)} items" if value else "empty"
            raise ConfigError(f"{name}: {count}; at least {self.least} is needed")


class Relation(Protocol):
    """Relation of a field to the other fields of its dataclass, in the annotation of its type.

    `check_bounds` checks it when the dataclass is complete.
    """

    def check_in(self, config: Any, value: Any, name: str) -> None:
        """Raises ConfigError if the relation does not hold for the value of a field of `config`;
        `name` is its key path for messages.
        """


def from_mapping(
    cls: type[_Config], data: Any, name: str, labels: Mapping[str, str] | None = None
) -> _Config:
    """Builds a dataclass from a mapping, with nested dataclasses from nested mappings. Keys that
    are listed in `WITHOUT_EFFECT` of the dataclass are skipped.

    Args:
        data: mapping from field names to values.
        name: key path of the mapping for messages; empty for a whole file.
        labels: names of fields in messages, if they have another name in the file.

    Raises:
        ConfigError: `data` is not a mapping, a key is unknown or missing, or a value is wrong.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{name or 'file'}: expected a mapping, got {type(data).__name__}")
    hints = kinds(cls)
    skipped = getattr(cls, "WITHOUT_EFFECT", ())
    data = {key: value for key, value in data.items() if key not in skipped}
    if unknown := [str(key) for key in data if key not in hints]:
        raise ConfigError(
            f"{name or 'file'}: unknown key {shown(unknown[0])}; expected one of {', '.join(hints)}"
        )
    paths = {key: (labels or {}).get(key, key) for key in hints}
    if name:
        paths = {key: f"{name}.{path}" for key, path in paths.items()}
    values = {key: convert(value, hints[key], paths[key]) for key, value in data.items()}
    definition: Any = cls
    for field in dataclasses.fields(definition):
        if field.name not in values and field.default is field.default_factory is MISSING:
            raise ConfigError(f"{paths[field.name]}: missing")
    with prefixed(f"{name}." if name else ""):
        return cls(**values)


def known_fields(config: type, document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a document that are fields of a dataclass. Published files have more
    entries.
    """
    return {name: value for name, value in document.items() if name in kinds(config)}


def kinds(config: type) -> Mapping[str, Any]:
    """Returns the types of the fields of a dataclass, with the bounds in their annotations."""
    hashable: Any = config  # the type checker takes a class for one of its instances
    return _evaluated(hashable)


@cache  # because Python evaluates the annotations of all fields at every call
def _evaluated(config: Any) -> Mapping[str, Any]:
    hints = get_type_hints(config, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


def check_bounds(config: Any, name: str) -> None:
    """Raises ConfigError if a field of a dataclass is out of its bounds, or breaks a relation.

    `convert` checks the values of files. This function also checks configurations that are created
    in code. `name` is the key path of the dataclass for messages; empty for a whole file.
    """
    for field in dataclasses.fields(config):
        path = f"{name}.{field.name}" if name else field.name
        _check_value(config, getattr(config, field.name), kinds(type(config))[field.name], path)


def _check_value(config: Any, value: Any, kind: Any, name: str) -> None:
    if get_origin(kind) is Annotated:
        kind, *bounds = get_args(kind)
        for bound in bounds if value is not None else ():
            if isinstance(bound, Bounds | Length):
                bound.check(value, name)
            else:
                bound.check_in(config, value, name)
    if get_origin(kind) is tuple:
        for index, item in enumerate(value):
            _check_value(config, item, get_args(kind)[0], f"{name}[{index}]")


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Adds a prefix to the messages of ConfigErrors, unless they begin with it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(prefix + str(error).removeprefix(prefix)) from error


def convert(value: Any, kind: Any, name: str) -> Any:
    """Converts a value of a file to the type `kind`. Raises ConfigError if the value has another
    type, or is out of bounds.

    Args:
        kind: int, float, bool, str, a Literal, a dataclass, a tuple or a dict with such items. It
            may allow None, and may be annotated with bounds. A whole float is accepted as an int.
        name: key path of the value for messages.
    """
    if get_origin(kind) is Annotated:
        kind, *bounds = get_args(kind)
        converted = convert(value, kind, name)
        for bound in bounds if converted is not None else ():
            if isinstance(bound, Bounds | Length):
                bound.check(converted, name)
        return converted
    if dataclasses.is_dataclass(kind):
        return from_mapping(cast("type[Any]", kind), value, name)
    if get_origin(kind) is UnionType:
        if value is None:
            return None
        members = [member for member in get_args(kind) if member is not NoneType]
        kind = members[0] if len(members) == 1 else _variant(members, value, name)
        return convert(value, kind, name)
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


def _variant(members: list[Any], value: Any, name: str) -> Any:
    """Returns the dataclass whose first field, a Literal, has the same value as a mapping."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: expected an object, got {type(value).__name__}")
    field = next(iter(kinds(members[0])))
    variants = {get_args(kinds(member)[field])[0]: member for member in members}
    if (kind := value.get(field)) not in variants:
        names = " nor ".join(variants)
        raise ConfigError(f"{name}.{field}: {shown(kind)} is neither {names}")
    return variants[kind]


def shown(value: Any) -> str:
    """Formats any value for a message: on one line, at most about 80 characters long."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        # Python raises an error when it converts a very long integer to decimal.
        return f"an integer of {value.bit_length()} bits"
    is_scalar = isinstance(value, (int, float, str, bool, type(None)))
    text = repr(value) if is_scalar else type(value).__name__
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def number(
    kind: type[int] | type[float], least: int = 0, most: int = 0, name: str = ""
) -> Callable[[str], Any]:
    """Returns a converter for `argparse`, which accepts finite numbers from `least` to `most`; 0
    for no bound. `name` is the noun for the number in messages.
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
