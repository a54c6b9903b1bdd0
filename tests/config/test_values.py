"""Values of files and commands: conversion to types, and messages with the path of a key."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from token2wav.config.values import (
    Bounds,
    Length,
    convert,
    from_mapping,
    known_fields,
    number,
    prefixed,
    shown,
)
from token2wav.errors import ConfigError

Small = Annotated[int, Bounds(1, 9)]


@dataclass(frozen=True)
class Inner:
    sizes: Annotated[tuple[Small, ...], Length(2)] = ()
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    count: Annotated[int | None, Bounds(1, 9)] = None


def test_nested_mappings() -> None:
    data = {"inner": {"sizes": [1, 2.0], "kind": "b"}, "count": None}
    assert from_mapping(Outer, data, "") == Outer(Inner((1, 2), "b"))
    assert known_fields(Inner, {"kind": "b", "other": 1}) == {"kind": "b"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inner": {"sizes": [1, 10]}}, "inner.sizes[1]: 10 is not between 1 and 9"),
        ({"inner": {"sizes": [1, 2, 3]}}, "inner.sizes: 3 items; at most 2 are allowed"),
        ({"inner": {"kind": "c"}}, "inner.kind: 'c' is not one of a, b"),
        ({"inner": {"size": 1}}, "inner: unknown key 'size'; expected one of sizes, kind"),
        ({"inner": []}, "inner: expected a mapping, got list"),
        ({"inner": {}, "count": True}, "count: expected int, got True"),
        ([], "file: expected a mapping, got list"),
    ],
)
def test_messages_name_the_key(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(Outer, data, "")
    assert str(caught.value) == message


def test_tables_of_values() -> None:
    assert convert({"a": 1}, dict[str, float], "x") == {"a": 1.0}
    with pytest.raises(ConfigError, match=r"x\.a: expected float, got 'one'"):
        convert({"a": "one"}, dict[str, float], "x")


def test_a_prefix_is_added_once() -> None:
    twice = prefixed("file: "), prefixed("file: ")
    with pytest.raises(ConfigError, match=r"^file: key: wrong$"), twice[0], twice[1]:
        raise ConfigError("key: wrong")


def test_any_value_is_shown_on_a_short_line() -> None:
    assert shown("x" * 100) == f"'{'x' * 79}..."
    assert shown(1 << 20_000) == "an integer of 20001 bits"
    assert shown("a\nb") == r"'a\nb'"
    assert shown([1]) == "list"


def test_numbers_of_commands() -> None:
    count = number(int, least=1, most=4, name="a count")
    assert count("4") == 4
    assert number(float)("0.5") == 0.5
    for text in ("5", "0", "-1", "1.0", "one", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a count from 1 to 4"):
            count(text)
    with pytest.raises(argparse.ArgumentTypeError, match="'nan' is not a number of at least 0"):
        number(float)("nan")
