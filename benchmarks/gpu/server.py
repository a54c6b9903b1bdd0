"""Section server: loads on a real tritonserver."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.gpu.settings import PACE, SETTINGS, LeftOut, Row, Rows, Settings
from benchmarks.gpu.streams import BUFFER_S, STARTS_WITHIN_S, TOKENS_PER_PUSH
from benchmarks.load.clients import Load
from benchmarks.load.measure import measure
from benchmarks.load.subject import Subject
from token2wav_server import TritonNotFoundError
from token2wav_server.launcher.binaries import find_tritonserver


def server(folder: Path, settings: Settings) -> Rows:
    """Measures loads on a real tritonserver with `benchmarks.load`.

    The clients run on this machine.
    """
    with tempfile.TemporaryDirectory() as temporary:
        try:
            find_tritonserver(Path(temporary))
        except TritonNotFoundError as error:
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
        Load(clients, PACE, STARTS_WITHIN_S, settings.stream_s, TOKENS_PER_PUSH, BUFFER_S)
        for clients in settings.clients
    ]
    utterance = Subject.of(folder, settings.stream_s)
    # A process that goes on is not asked for the loads that have rows, and does not repeat them.
    asked = list[Load]()
    rows = measure(folder, "batching", iter(asked.pop, None), utterance, server_settings)
    for load in loads:
        yield f"{settings.setting}, {load.label}", partial(_row_of, rows, asked, load)
    rows.close()


def _row_of(rows: Iterator[Row], asked: list[Load], load: Load) -> Row:
    asked.append(load)
    for row in rows:
        return {"problem": None, **row}
    raise LeftOut("no server runs after the failure of the load before")
