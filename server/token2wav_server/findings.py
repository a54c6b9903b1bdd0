"""Findings of checks of a machine or a model, and the run of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from token2wav.commands import missing
from token2wav.errors import Token2WavError
from token2wav_server.launcher.errors import ServerError


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        check: name of the check; empty for the name by which `examine` runs the check.
        message: what was found; of a warning or an error with its remedy.
    """

    check: str
    state: Literal["ok", "warning", "error"]
    message: str

    def __str__(self) -> str:
        return f"{self.state:8} {self.check:16} {self.message}"


def ok(message: str, check: str = "") -> Finding:
    return Finding(check, "ok", message)


def warning(message: str, check: str = "") -> Finding:
    return Finding(check, "warning", message)


def error(message: str, check: str = "") -> Finding:
    return Finding(check, "error", message)


Check = Callable[[], Finding | Iterable[Finding]]


def examine(checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Runs checks by their names, and yields their findings, named after their checks unless they
    have a name.
    """
    for name, check in checks.items():
        try:
            found = check()
            for finding in [found] if isinstance(found, Finding) else found:
                yield replace(finding, check=finding.check or name)
        except (ServerError, Token2WavError) as reason:
            yield error(str(reason), name)
        except ModuleNotFoundError as absent:
            yield error(missing(absent, "server"), name)
