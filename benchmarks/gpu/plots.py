"""The report's two pictures: chunks over their floor, and streams that were held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.gpu.capacity import UNBROKEN
from benchmarks.gpu.verdicts import Sections

mpl.use("Agg")
from matplotlib import pyplot as plt


def draw(sections: Sections, folder: Path) -> list[str]:
    """Draws what there are rows for; returns the names of the files."""
    drawn = []
    if rows := sections.get("chunks", {}).get("rows"):
        plot_chunks(rows, folder / "chunks.png", _title(sections["chunks"]))
        drawn.append("chunks.png")
    if trials := sections.get("streams", {}).get("trials"):
        plot_capacity(trials, folder / "capacity.png", _title(sections["streams"]))
        drawn.append("capacity.png")
    return drawn


def _title(section: Any) -> str:
    return f"{section['gpu'] or 'rehearsal on a CPU'}, {section['size']} model, {section['date']}"


def plot_chunks(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Milliseconds of a batch over its streams: a panel for each length of chunk, a line for each history."""
    hops = sorted({row["hop_tokens"] for row in rows})
    figure, axes = plt.subplots(1, len(hops), figsize=(5 * len(hops), 4), layout="constrained", squeeze=False)
    for axis, hop in zip(axes[0], hops, strict=True):
        for spoken_s in sorted({row["spoken_s"] for row in rows if row["hop_tokens"] == hop}):
            own = [row for row in rows if row["hop_tokens"] == hop and row["spoken_s"] == spoken_s]
            streams = [row["streams"] for row in own]
            label = f"after {spoken_s:g} s" if spoken_s else "first chunk"
            [line] = axis.plot(streams, [row["total_ms"][0] for row in own], marker="o", label=label)
            axis.plot(streams, [row["floor_ms"] for row in own], "--", marker=".", color=line.get_color())
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("streams in the batch")
        axis.set_ylabel("ms per batch of chunks; dashed: floor")
        axis.set_title(f"chunks of {hop} tokens", fontsize=10)
        axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def plot_capacity(trials: list[dict[str, Any]], path: Path, title: str) -> None:
    """Share of unbroken streams over their number, a line for each way to serve them."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for setup in dict.fromkeys(trial["setup"] for trial in trials):
        own = sorted((trial for trial in trials if trial["setup"] == setup), key=lambda trial: trial["streams"])
        axis.plot([trial["streams"] for trial in own], [trial["unbroken"] for trial in own], marker="o", label=setup)
    axis.axhline(UNBROKEN, color="gray", linestyle=":", label=f"{UNBROKEN:.0%}")
    axis.set_xscale("log", base=2)
    axis.set_ylim(-0.05, 1.05)
    axis.set_xlabel("streams at once, tokens at 25 per second")
    axis.set_ylabel("share of streams without a gap")
    axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)
