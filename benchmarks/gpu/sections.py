"""Sections of the report by name, and the sections that run tests or a server."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.gpu.chunks import chunks, drift
from benchmarks.gpu.first_audio import first_audio
from benchmarks.gpu.late_first import late_first
from benchmarks.gpu.parity import parity
from benchmarks.gpu.pytest_rows import rows_of_tests
from benchmarks.gpu.settings import PACE, SETTINGS, LeftOut, Row, Rows, Settings
from benchmarks.gpu.streams import BUFFER_S, STARTS_WITHIN_S, TOKENS_PER_PUSH, streams

Section = Callable[[Path, Settings], Rows]


def optional(module: str) -> Any:
    """Imports a module that needs packages which may be missing.

    Raises:
        LeftOut: a package is missing; the message names the first one.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise LeftOut(f"not installed: {error.name}") from None


def tests(folder: Path, settings: Settings) -> Rows:
    """Runs all test files that have the mark `gpu`."""
    yield from rows_of_tests(files_of_tests()[: settings.test_files or None])


def files_of_tests() -> list[Path]:
    """Returns the test files, and folders of test files, that have the mark `gpu`."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    marked = [path for path in paths if "mark.gpu" in path.read_text()]
    # A mark in a conftest.py applies to all tests of its folder.
    return [path if path.name.startswith("test_") else path.parent for path in marked]


def server(folder: Path, settings: Settings) -> Rows:
    """Measures loads on a real tritonserver with `benchmarks.load`.

    The clients run on this machine.
    """
    closed_loop, subject, binaries = map(
        optional,
        (
            "benchmarks.load.closed_loop",
            "benchmarks.load.subject",
            "token2wav_server.launcher.binaries",
        ),
    )
    with tempfile.TemporaryDirectory() as temporary:
        try:
            binaries.find_tritonserver(Path(temporary))
        except binaries.TritonNotFoundError as error:
            raise LeftOut(str(error)) from None
    stream, storage = SETTINGS[settings.setting]
    server_settings = {
        "stream": {**asdict(stream), "steps": []},
        "runtime": asdict(settings.runtime(cache_storage=storage)),
        "limits": {
            "player_buffer_seconds": BUFFER_S,
            "streams": 2 * max(settings.clients),
            "batch_streams": settings.batch_streams,
        },
    }
    # The same starts as in section streams, so that server and library can be compared.
    loads = [
        closed_loop.Load(
            clients, PACE, STARTS_WITHIN_S, settings.stream_s, TOKENS_PER_PUSH, BUFFER_S
        )
        for clients in settings.clients
    ]
    utterance = subject.Subject.of(folder, settings.stream_s)
    rows = closed_loop.measure(folder, "batching", loads, utterance, server_settings)
    for load in loads:
        yield f"{settings.setting}, {load.label}", partial(_load_of, rows)
    rows.close()


def _load_of(rows: Iterator[Row]) -> Row:
    for row in rows:
        return {"problem": None, **row}
    raise LeftOut("no server runs after the failure of the load before")


def _elsewhere(module: str, section: str) -> Section:
    """Returns a section of a module that needs further packages, or the lab."""

    def rows(folder: Path, settings: Settings) -> Rows:
        yield from getattr(optional(module), section)(folder, settings)

    rows.__name__ = section
    return rows


SECTIONS: dict[str, Section] = {
    section.__name__: section
    for section in (
        first_audio,
        late_first,
        chunks,
        _elsewhere("benchmarks.gpu.codecs", "codecs"),
        server,
        _elsewhere("lab.tiles.measure", "products"),
        _elsewhere("lab.peers.flow_baselines", "baselines"),
        _elsewhere("lab.peers.qwen3_decoders", "qwen3_tts"),
        parity,
        drift,
        tests,
        streams,
        _elsewhere("benchmarks.gpu.engines", "engines"),
    )
}
