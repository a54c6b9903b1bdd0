"""Plot of a perf_analyzer run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws first audio and throughput over concurrency, first audio over request rate; our own client's dashed."""
    done = [row for row in rows if not row["failed"]]
    closed = [row for row in done if row["concurrency"]]
    figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    _line(axes[0], closed, "concurrency", lambda part: part["first_audio_ms"]["p50"], "p50", "o")
    _line(axes[0], closed, "concurrency", lambda part: part["first_audio_ms"]["p99"], "p99", "^")
    _line(axes[1], closed, "concurrency", lambda part: part["audio_seconds_per_second"], "", "o")
    for kind in ("constant", "poisson"):
        paced = [row for row in done if row["distribution"] == kind]
        _line(axes[2], paced, "rate", lambda part: part["first_audio_ms"]["p50"], f"{kind}, p50", "o")
    names = (
        ("requests at once", "first audio (ms)"),
        ("requests at once", "audio per second (s)"),
        ("requests per second", "first audio (ms)"),
    )
    for axis, (x, y) in zip(axes, names, strict=True):
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.set_ylim(bottom=0)
        if axis.lines:
            axis.legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _line(
    axis: Any, rows: list[dict[str, Any]], x: str, y: Callable[[dict[str, Any]], float], label: str, marker: str
) -> None:
    for part, who, style in (("heard", "perf_analyzer", "-"), ("own", "our client", "--")):
        shown = [row for row in rows if row[part] and row[part]["first_audio_ms"]]
        if shown:
            values = [y(row[part]) for row in shown]
            axis.plot([row[x] for row in shown], values, style, marker=marker, label=f"{who} {label}".strip())
