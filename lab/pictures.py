"""Pictures of benchmarks/results/README.md and docs/exactness.md, from the committed results: load,
gaps, the next packet of codecs, and the errors of windows.

    .venv/bin/python -m lab.pictures

Writes docs/images/first_audio.png, gaps.png, next_packet.png and exactness.png.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.environment import RESULTS, ROOT, saved_runs
from benchmarks.load.subject import LABELS
from lab.exactness import CURVE_SECONDS
from lab.png import save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = ROOT / "docs" / "images"
LOADS = ("open_loop", "open_loop_codecs")
SHOWN = ("demo_codec", "pocket_tts", "mimi", "cosyvoice3", "demo_voice", "higgs")
FRAMES_BEFORE = 25  # of a packet, so that decoders without a state have a past to recompute
_DPI = 100


def load_rows() -> list[dict[str, Any]]:
    """Returns the rows of the open loop, of the models that the pictures show."""
    files = (json.loads((RESULTS / f"{name}.json").read_text()) for name in LOADS)
    rows = [row for file in files for row in file["rows"]]
    return [row for name in SHOWN for row in rows if row["model"] == name]


def draw_first_audio(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draws first audio over the number of utterances that start in a second."""
    figure, axis = _axis((7.5, 4))
    for name, model_rows in _by_model(rows):
        rates = [row["utterances_per_s"] for row in model_rows]
        p50, p99 = (
            [row["first_playable_ms"][quantile] for row in model_rows]
            for quantile in ("p50", "p99")
        )
        [line] = axis.plot(rates, p50, "o-", label=LABELS[name])
        axis.plot(rates, p99, "--", color=line.get_color(), linewidth=1)
    axis.set(ylabel="first audio (ms): solid p50, dashed p99", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    return figure


def draw_gaps(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draws the share of utterances without a gap over the number that start in a second."""
    figure, axis = _axis((7.5, 4))
    for name, model_rows in _by_model(rows):
        rates = [row["utterances_per_s"] for row in model_rows]
        axis.plot(rates, [100 * row["buffer_200"] for row in model_rows], "o-", label=LABELS[name])
    axis.set(ylabel="utterances without a gap (%)\nplayer starts after 200 ms", ylim=(0, 104))
    return figure


def draw_next_packet(runs: Sequence[dict[str, Any]]) -> Figure:
    """Draws the time of the next packet of one stream, beside the public code."""
    from matplotlib import pyplot as plt

    packets = sorted(_packets(runs), key=lambda packet: packet["public_ms"] / packet["ours_ms"])
    figure, axis = plt.subplots(figsize=(7.5, 0.4 * len(packets) + 1.2), layout="constrained")
    places = np.arange(len(packets))
    for shift, name, label, colour in (
        (0.2, "public_ms", "public code", "tab:red"),
        (-0.2, "ours_ms", "token2wav", "tab:blue"),
    ):
        times = [packet[name] for packet in packets]
        axis.barh(places + shift, times, 0.4, label=label, color=colour)
    pace = [packet["packet_ms"] for packet in packets]
    axis.plot(pace, places, "k|", markersize=14, label="audio of the packet")
    axis.set(xscale="log", xlabel="ms for the next packet of one stream, after 25 frames")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(places, labels=[packet["name"] for packet in packets])
    axis.legend(loc="lower right")
    return figure


def draw_exactness(runs: Sequence[dict[str, Any]]) -> Figure:
    """Draws the error of each codec over time, and the audio around a seam.

    Args:
        runs: cases of `lab.exactness`.
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 6))
    panels = [axes[1][0], axes[1][1], axes[0][1]]
    colours = ("tab:red", "tab:orange", "tab:blue")
    for panel, run in zip(panels, runs, strict=True):
        for way, colour in zip(run["ways"], colours, strict=False):  # without early audio
            curve = way["error_curve_db"]
            seconds = (np.arange(len(curve)) + 0.5) * CURVE_SECONDS
            panel.plot(seconds, curve, color=colour, linewidth=1.2, label=way["name"])
        panel.set(title=run["name"], xlabel="s", ylabel="error, dB", ylim=(-165, 45))
        panel.legend(fontsize=8, loc="upper center", ncols=3)
    [excerpt] = [run["excerpt"] for run in runs if "excerpt" in run]
    near = axes[0][0]
    milliseconds = np.arange(len(excerpt["whole"])) / runs[-1]["sample_rate"] * 1e3
    milliseconds -= milliseconds[len(milliseconds) // 2]
    near.axvline(0, color="gray", linewidth=0.8, linestyle=":")
    near.plot(milliseconds, excerpt["whole"], color="0.75", linewidth=5, label="whole")
    near.plot(milliseconds, excerpt["alone"], color=colours[0], label="each patch alone")
    near.plot(milliseconds, excerpt["ours"], color=colours[2], linewidth=1, label="token2wav")
    near.set(title=f"the sentence around the seam at {excerpt['seam_seconds']:.2f} s", xlabel="ms")
    near.set(ylim=(-0.45, 0.32))
    near.legend(fontsize=8, loc="lower left", framealpha=0.9)
    figure.tight_layout()
    return figure


def _packets(runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for run in runs:
        for row in run["rows"]:
            if (row["streams"], row["frames_before"]) == (1, FRAMES_BEFORE):
                yield {
                    "name": f"{run['family']} ({run['peer']})",
                    "public_ms": row["public_ms"][0],
                    "ours_ms": row["ours_ms"][0],
                    # Runs without this value have calls of one frame of 80 ms.
                    "packet_ms": 1000 * run.get("call_seconds", 0.08),
                }


def _by_model(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for name in dict.fromkeys(row["model"] for row in rows):
        yield name, [row for row in rows if row["model"] == name and row["first_playable_ms"]]


def _axis(inches: tuple[float, float]) -> tuple[Figure, Axes]:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=inches, layout="constrained")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("utterances that start in a second")
    axis.xaxis.set_major_formatter("{x:g}")
    return figure, axis


def main(folder: Path = IMAGES) -> None:
    """Draws all pictures into a folder."""
    # Imported here, because tests import this module, and drawing takes long to import.
    import matplotlib as mpl

    mpl.use("Agg")
    rows = load_rows()
    pictures = {"first_audio": draw_first_audio(rows), "gaps": draw_gaps(rows)}
    for figure in pictures.values():
        figure.legend(loc="outside lower center", ncols=3)
    pictures["next_packet"] = draw_next_packet(saved_runs("codec_peers"))
    cases = json.loads((RESULTS / "exactness.json").read_text())["cases"]
    pictures["exactness"] = draw_exactness(cases[:3])  # without those in windows only
    for name, figure in pictures.items():
        save_picture(figure, folder / f"{name}.png", dpi=_DPI)
        print(folder / f"{name}.png")


if __name__ == "__main__":
    main()
