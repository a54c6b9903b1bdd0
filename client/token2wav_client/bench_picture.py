"""Picture of a benchmark: first audio, time between chunks and throughput by number of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_INCHES, _DPI = (12, 3.8), 100


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the rows of a benchmark as a PNG file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    streams = [row["streams"] for row in rows]
    figure, axes = plt.subplots(1, 3, figsize=_INCHES, layout="constrained")
    for axis, name, label in (
        (axes[0], "first_audio_ms", "latency to first audio (ms)"),
        (axes[1], "between_chunks_ms", "latency between chunks (ms)"),
    ):
        measured = [row for row in rows if row[name]]
        for quantile, style in (("p50", "o-"), ("p95", "s--"), ("p99", "^:")):
            axis.plot(
                [row["streams"] for row in measured],
                [row[name][quantile] for row in measured],
                style,
                label=quantile,
            )
        axis.set(ylabel=label, ylim=0)
        axis.legend()
    axes[2].plot(streams, [row["rtfx"] or 0 for row in rows], "o-", label="all streams")
    axes[2].plot(streams, streams, ":", color="gray", label="pace of speech")
    axes[2].set(ylabel="RTFX (seconds of audio per second)", ylim=0)
    axes[2].legend()
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(streams, labels=list(map(str, streams)))
        axis.minorticks_off()
        axis.set_xlabel("parallel streams")
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)
