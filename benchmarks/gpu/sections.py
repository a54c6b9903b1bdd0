"""Sections of the report. A module is imported for its section only, because it may need packages
that are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.settings import LeftOut, Rows, Settings

# Module of each section. The function has the name of the section.
SECTIONS = {
    "first_audio": "benchmarks.gpu.first_audio",
    "late_first": "benchmarks.gpu.late_first",
    "chunks": "benchmarks.gpu.chunks",
    "codecs": "benchmarks.gpu.codecs",
    "server": "benchmarks.gpu.server",
    "products": "lab.tiles.measure",
    "baselines": "lab.peers.flow_baselines",
    "qwen3_tts": "lab.peers.qwen3_decoders",
    "parity": "benchmarks.gpu.parity",
    "drift": "benchmarks.gpu.chunks",
    "tests": "benchmarks.gpu.pytest_rows",
    "streams": "benchmarks.gpu.streams",
    "engines": "benchmarks.gpu.engines",
}


def section_named(name: str) -> Callable[[Path, Settings], Rows]:
    """Imports a section.

    Raises:
        LeftOut: a package is missing; the message names the first one.
    """
    try:
        section: Callable[[Path, Settings], Rows] = getattr(import_module(SECTIONS[name]), name)
    except ModuleNotFoundError as error:
        raise LeftOut(f"not installed: {error.name}") from None
    return section
