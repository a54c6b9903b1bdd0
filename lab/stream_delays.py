"""Picture of the delay of chunks by concurrent streams, from section baselines of a GPU report.

    .venv/bin/python -m lab.stream_delays out/report/report.json

Writes docs/images/streams.png. The delays are computed: streams of a minute start within one
second, and each needs a chunk of 25 tokens a second. A server computes the oldest chunks first, in
batches that take the measured times. A delay of more than a second is not real time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.report import rehearsed, rows_of
from lab.pictures import IMAGES
from lab.png import save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STREAMS = sorted({round(2 ** (exponent / 4)) for exponent in range(37)})  # 1 to 512
_CHUNKS = 60  # of each stream
_CHUNK_MS = 1000.0


def p99_delay_ms(batch_ms: Mapping[int, float], streams: int) -> float:
    """Computes the 99th percentile of the delay of chunks, from their last token to their audio.

    Args:
        batch_ms: measured times by batch size. The largest size is the largest batch of the server.
    """
    sizes, times = zip(*sorted(batch_ms.items()), strict=True)
    due = _CHUNK_MS * np.add.outer(np.arange(_CHUNKS), np.arange(streams) / streams).ravel()
    delays, first, now = np.zeros(len(due)), 0, 0.0
    while first < len(due):
        now = max(now, due[first])
        stop = first + min(int(np.searchsorted(due[first:], now, side="right")), sizes[-1])
        now += float(np.interp(stop - first, sizes, times))
        delays[first:stop] = now - due[first:stop]
        first = stop
    return float(np.percentile(delays, 99))


def measured(content: Mapping[str, Any]) -> dict[str, tuple[dict[int, float], float]]:
    """Returns the times of batches in ms and the error of the mel for each system, after the
    longest history that all systems have.
    """
    rows = rows_of(content, "baselines").values()
    errors = {row["system"]: row["mel_error"] for row in rows if "mel_error" in row}
    timed = [row for row in rows if "total_ms" in row and row["system"] in errors]
    histories = [{row["spoken_s"] for row in timed if row["system"] == name} for name in errors]
    longest = max(set.intersection(*histories))
    return {
        name: (
            {
                row["streams"]: row["total_ms"][0]
                for row in timed
                if (row["system"], row["spoken_s"]) == (name, longest)
            },
            error,
        )
        for name, error in errors.items()
    }


def draw(content: Mapping[str, Any], streams: Sequence[int] = STREAMS) -> Figure:
    """Draws a line for each system, with the error of its mel."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name, (batch_ms, error) in measured(content).items():
        delays = [p99_delay_ms(batch_ms, count) for count in streams]
        axis.plot(streams, delays, label=f"{name} (error of the mel {error:.0e})")
    axis.axhline(_CHUNK_MS, color="k", linestyle="--", linewidth=1, label="real time")
    card = content["facts"].get("gpu") or "no GPU"
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="concurrent streams",
        ylabel="p99 delay of a chunk of 1 s (ms)",
        title=f"{'Rehearsal: ' if rehearsed(content) else ''}CosyVoice3, random weights, {card}",
    )
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend()
    return figure


def main() -> None:
    import matplotlib as mpl

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="report.json or results.json")
    parser.add_argument("--out", type=Path, default=IMAGES / "streams.png")
    options = parser.parse_args()
    mpl.use("Agg")
    save_picture(draw(json.loads(options.report.read_text())), options.out, dpi=100)
    print(options.out)


if __name__ == "__main__":
    main()
