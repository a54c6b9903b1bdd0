"""Findings of checks of a machine or a model, and the run of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from token2wav.commands import missing
from token2wav.errors import Token2WavError
from token2wav_server.launcher.errors import ServerError


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        check: name of the check.
        message: what was found; of a warning or an error with its remedy.
    """

    check: str
    state: Literal["ok", "warning", "error"]
    message: str

    def __str__(self) -> str:
        return f"{self.state:8} {self.check:16} {self.message}"


Check = Callable[[], Iterable[Finding]]


def examine(checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Runs checks by their names, and yields their findings."""
    for name, check in checks.items():
        try:
            yield from check()
        except (ServerError, Token2WavError) as error:
            yield Finding(name, "error", str(error))
        except ModuleNotFoundError as error:
            yield Finding(name, "error", missing(error, "server"))
