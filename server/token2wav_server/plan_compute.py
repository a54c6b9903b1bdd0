"""Compute capacity of a GPU: measured costs tell how many streams run in real time; nothing is estimated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from token2wav.errors import ConfigError


@dataclass(frozen=True)
class ComputeCost:
    """Measured cost of a batch in one engine.

    Attributes:
        engine, precision: engine that was measured.
        batch: number of streams that are computed together.
        history_s: seconds of audio before the chunk, prompt included.
        hop_s: seconds of audio in the chunk.
        seconds: time that flow and vocoder took for the batch.
    """

    engine: str
    precision: str
    batch: int
    history_s: float
    hop_s: float
    seconds: float

    @property
    def real_time_factor(self) -> float:
        """Real-time factor of each stream in the batch: below 1 is faster than playback."""
        return self.seconds / self.hop_s

    @property
    def streams(self) -> int:
        """Number of streams that run in real time, batch after batch, if nothing else takes time."""
        return int(self.batch * self.hop_s / self.seconds)


@dataclass(frozen=True)
class Compute:
    """Contents of a file of measurements; `problem` says why there are none."""

    host: str = ""
    costs: tuple[ComputeCost, ...] = ()
    problem: str = ""

    @property
    def best(self) -> ComputeCost | None:
        return max(self.costs, key=lambda cost: cost.streams, default=None)


def read_costs(path: Path | None, gpu: str | None, measured_as: str, history_s: float, token_rate: float) -> Compute:
    """Reads the measurements for a GPU and a model.

    Args:
        path: file written by `make gpu-check` or `python -m benchmarks.engines`.
        gpu: name that the host's must contain; None for any.
        measured_as: name of the model in the file.
        history_s: seconds of prompt and stream; the longest measured history that is not beyond it counts.
        token_rate: tokens per second.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        return Compute(
            problem="not measured on this GPU: run make gpu-check there, and name its report.json with --costs"
        )
    try:
        data = json.loads(path.read_bytes())
        host = str(data.get("gpu") or data["processor"])
        rows = [
            row for result in data["results"] if result["model"] == measured_as for row in _costs(result, token_rate)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"costs: {path} is no result of make gpu-check or benchmarks.engines ({error!r})") from None
    if gpu is not None and gpu.lower() not in host.lower():
        return Compute(host, problem=f"not measured on this GPU: {path} is of {host}")
    if not rows:
        return Compute(host, problem=f"not measured for this model: {path} has nothing of '{measured_as}'")
    return Compute(host, tuple(_nearest(rows, history_s)))


def _costs(result: dict[str, Any], token_rate: float) -> list[ComputeCost]:
    case = result["case"]
    return [
        ComputeCost(
            case["engine"] + ("" if case["graphs"] else ", no graphs"),
            case["precision"],
            row["streams"],
            row["history_s"],
            row["hop_tokens"] / token_rate,
            (row["flow_ms"][0] + row["vocoder_ms"][0]) / 1000,
        )
        for row in result["rows"]
    ]


def _nearest(rows: list[ComputeCost], history_s: float) -> list[ComputeCost]:
    """Returns the longest chunks at the longest history within `history_s`, or at the shortest there is."""
    longest_hop = max(row.hop_s for row in rows)
    rows = [row for row in rows if row.hop_s == longest_hop]
    within = [row.history_s for row in rows if row.history_s <= history_s]
    history = max(within) if within else min(row.history_s for row in rows)
    return [row for row in rows if row.history_s == history]
