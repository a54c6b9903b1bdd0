"""Relations between the sizes of a model, as data in the annotations of fields.

For example, `num_key_value_heads: Annotated[Heads, Equals("num_attention_heads")]` refuses a
configuration whose two fields differ. `values.check_bounds` checks them. `other` is always the name
of another field or of a property of the same dataclass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from token2wav.config.values import shown
from token2wav.errors import ConfigError


@dataclass(frozen=True)
class Only:
    """The only supported value."""

    value: Any

    def check_in(self, config: Any, value: Any, name: str) -> None:
        if value != self.value:
            raise ConfigError(
                f"{name}: {shown(value)} is not supported; expected {shown(self.value)}"
            )


@dataclass(frozen=True)
class Equals:
    """A value that another field repeats, or that others determine."""

    other: str
    source: str = ""  # fields that determine the other value, for messages; empty for a repetition

    def check_in(self, config: Any, value: Any, name: str) -> None:
        expected = getattr(config, self.other)
        if abs(value - expected) <= 1e-6 * abs(expected):
            return
        other = f"{self.source} give" if self.source else f"{self.other} is"
        raise ConfigError(f"{name}: {value:.10g}, but {other} {expected:.10g}; they must be equal")


@dataclass(frozen=True)
class Below:
    """A value that is less than another one."""

    other: str

    def check_in(self, config: Any, value: Any, name: str) -> None:
        if value >= (limit := getattr(config, self.other)):
            raise ConfigError(f"{name}: {value} is not below {self.other}, {limit}")


@dataclass(frozen=True)
class Divides:
    """A divisor of another value."""

    other: str

    def check_in(self, config: Any, value: Any, name: str) -> None:
        if (whole := getattr(config, self.other)) % value:
            raise ConfigError(f"{name}: {value} does not divide {self.other}, {whole}")


@dataclass(frozen=True)
class Multiple:
    """A multiple of another value, or of a number."""

    other: str | int
    meaning: str = ""  # noun for the other value, for messages; empty for its name

    def check_in(self, config: Any, value: Any, name: str) -> None:
        part = getattr(config, self.other) if isinstance(self.other, str) else self.other
        if value % part:
            raise ConfigError(
                f"{name}: {value} is no multiple of {part}, {self.meaning or self.other}"
            )


@dataclass(frozen=True)
class Even:
    """An even number."""

    reason: str  # reason for messages

    def check_in(self, config: Any, value: Any, name: str) -> None:
        if value % 2:
            raise ConfigError(f"{name}: {value} is odd; {self.reason}")


@dataclass(frozen=True)
class Odd:
    """An odd number."""

    reason: str  # reason for messages

    def check_in(self, config: Any, value: Any, name: str) -> None:
        if value % 2 == 0:
            raise ConfigError(f"{name}: {value} is even; {self.reason}")


@dataclass(frozen=True)
class Halves:
    """A number of channels that is halved once for each item of another field."""

    other: str

    def check_in(self, config: Any, value: Any, name: str) -> None:
        if value % (1 << (count := len(getattr(config, self.other)))):
            raise ConfigError(f"{name}: {value} cannot be halved {count} times")


@dataclass(frozen=True)
class Doubles:
    """A number of channels that is doubled once for each item of another field, up to 65536."""

    other: str

    def check_in(self, config: Any, value: Any, name: str) -> None:
        if value << (count := len(getattr(config, self.other))) > 1 << 16:
            raise ConfigError(
                f"{name}: {value} gives more than {1 << 16} channels after {count} doublings"
            )


@dataclass(frozen=True)
class AsLong:
    """A list that is as long as another one, or has some items more."""

    other: str
    more: int = 0

    def check_in(self, config: Any, value: Any, name: str) -> None:
        if len(value) != (count := len(getattr(config, self.other))) + self.more:
            raise ConfigError(
                f"{name}: {len(value)} items, but {self.other} has {count}; "
                f"{count + self.more} are needed"
            )


@dataclass(frozen=True)
class SameProduct:
    """Factors of upsampling whose product is that of other factors. An empty list is allowed."""

    other: str

    def check_in(self, config: Any, value: Any, name: str) -> None:
        product, expected = math.prod(value), math.prod(getattr(config, self.other))
        if value and product != expected:
            raise ConfigError(
                f"{name}: {product} samples for each frame, but {self.other} give {expected}"
            )


@dataclass(frozen=True)
class Gives:
    """A bound of a number that follows from a field."""

    other: str
    most: int
    meaning: str  # noun for the number, for messages

    def check_in(self, config: Any, value: Any, name: str) -> None:
        if (number := getattr(config, self.other)) > self.most:
            raise ConfigError(f"{name}: {number} {self.meaning}; at most {self.most} are allowed")


@dataclass(frozen=True)
class Descending:
    """Numbers of which each is a multiple of the next one."""

    def check_in(self, config: Any, value: Any, name: str) -> None:
        for above, below in pairwise(value):
            if above % below:
                raise ConfigError(f"{name}: {above} is no multiple of {below}")


@dataclass(frozen=True)
class Ascending:
    """Numbers in ascending order."""

    def check_in(self, config: Any, value: Any, name: str) -> None:
        if list(value) != sorted(value):
            raise ConfigError(f"{name}: {list(value)} are not in ascending order")
