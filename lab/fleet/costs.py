"""Costs of a server's chunks, fitted to measured and to expected times of an H200."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.environment import RESULTS
from testkit.simulation.server import ChunkWork, Costs

MEASURED = RESULTS / "gpu" / "report.json"
EXPECTED = RESULTS / "launches.json"
PROMPT_S = 3.0  # of the voices in both files


@dataclass(frozen=True)
class Fit:
    """Costs that follow from some timed batches.

    Attributes:
        error: largest relative error of a timed batch.
    """

    costs: Costs
    batches: int
    error: float


Timed = tuple[int, ChunkWork, float]  # streams of a batch, chunk of each, and seconds of the batch


def fit(timed: Sequence[Timed]) -> Fit:
    """Fits the terms of `Costs`, none below 0, by least squares of the relative errors.

    If all chunks have equally many tokens, the whole cost of a chunk counts as the cost of its
    tokens, so that longer chunks are not taken for cheaper ones.
    """
    terms = np.array(
        [
            [1, n, n * work.tokens, n * work.past_tokens, n * work.tokens * work.past_tokens]
            for n, work, _ in timed
        ],
        float,
    )
    if len({work.tokens for _, work, _ in timed}) == 1:
        terms[:, 1] = 0
    seconds = np.array([seconds for _, _, seconds in timed])
    factors, _ = nnls(terms / seconds[:, None], np.ones(len(timed)))
    error = np.abs(terms @ factors / seconds - 1).max()
    return Fit(Costs(*factors.tolist()), len(timed), float(error))


def measured(path: Path = MEASURED, token_rate: float = 25.0) -> list[Timed]:
    """Reads the timed chunks of CosyVoice3 from the report of `make gpu-check`."""
    return [
        (
            row["streams"],
            ChunkWork(row["computed_tokens"], round(token_rate * row["history_s"])),
            row["total_ms"][0] / 1000,
        )
        for row in json.loads(path.read_text())["rows"]
        if row["section"] == "chunks" and "total_ms" in row
    ]


def expected(family: str, token_rate: float, path: Path = EXPECTED) -> list[Timed]:
    """Reads the expected times of a family from `launches.json`. A codec has no past.

    A first chunk of a flow also computes a block of the prompt.
    """
    timed = []
    for row in json.loads(path.read_text())["rows"]:
        if row["family"] == family:
            flow = "flow" in row["stages"]
            first = flow and not row["spoken_s"]
            past_s = PROMPT_S + row["spoken_s"] if flow and not first else 0.0
            work = ChunkWork((1 + first) * row["hop_tokens"], round(token_rate * past_s))
            timed.append((row["streams"], work, row["stages"]["sum"]["expected_ms"] / 1000))
    return timed


def measured_streams(path: Path = MEASURED) -> list[dict[str, Any]]:
    """Reads the runs of many streams in real time from the report of `make gpu-check`."""
    return [
        row
        for row in json.loads(path.read_text())["rows"]
        if row["section"] == "streams" and "unbroken" in row
    ]
