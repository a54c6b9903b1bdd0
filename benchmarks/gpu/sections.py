"""The sections of the report by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.capacity import streams
from benchmarks.gpu.chunks import chunks
from benchmarks.gpu.floor_rates import floor
from benchmarks.gpu.kernels import kernels
from benchmarks.gpu.marked_tests import tests
from benchmarks.gpu.parity import parity
from benchmarks.gpu.peer import peer
from benchmarks.gpu.records import Record
from benchmarks.gpu.serving import server
from benchmarks.gpu.settings import Settings

# Takes the model's folder, what to measure, and where to write it down.
Section = Callable[[Path, Settings, Record], None]

SECTIONS: dict[str, Section] = {
    "tests": tests,
    "floor": floor,
    "parity": parity,
    "chunks": chunks,
    "peer": peer,
    "streams": streams,
    "profile": kernels,
    "server": server,
}
