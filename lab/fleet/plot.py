"""Picture of the saved results of the fleet simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

from lab.fleet.scenarios import GAPS
from lab.png import save_picture

mpl.use("Agg")
from matplotlib import pyplot as plt

_LEAST = 1e-5  # drawn in place of 0, which a logarithmic axis does not have


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws shares, gaps, crashes and growth."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    held, gaps, crashes, growth = axes.flat
    shares, crash = result["shares"], result["crash"]["light"]
    for label, suffix, marker in (
        ("light model, steady", " light", "o-"),
        ("light model, bursts of 8", " light, bursts", "s-"),
        ("scheduler, steady", " full", "k*"),
    ):
        percent = {
            int(name.split()[0]): 100 * entry["share"]
            for name, entry in shares.items()
            if name.endswith(suffix)
        }
        held.plot(list(percent), list(percent.values()), marker, label=label)
    held.set(xscale="log", ylim=(0, 110), xlabel="servers", ylabel="share of its streams, %")
    held.set_title("99.9 % of utterances without a gap", fontsize=10)
    held.legend()
    for name in ("1 full", "1 light", "4 light", "16 light", "256 light"):
        rows = sorted(shares[name]["rows"], key=lambda row: row["share"])
        gaps.plot(
            [100 * row["share"] for row in rows],
            [max(_LEAST, row["gaps"]) for row in rows],
            "k*-" if "full" in name else "o-",
            label=f"{name.split()[0]} servers, {'scheduler' if 'full' in name else 'light model'}",
        )
    gaps.set(yscale="log", xlabel="share of its streams, %", ylabel="utterances with a gap")
    for servers in sorted({row["servers"] for row in crash}):
        rows = [row for row in crash if row["servers"] == servers]
        crashes.plot(
            [100 * row["share"] for row in rows],
            [max(_LEAST, row["others"]) for row in rows],
            "o-",
            label=f"one of {servers} servers",
        )
    crashes.set(yscale="log", xlabel="share before the crash, %", ylabel="gaps of other listeners")
    crashes.set_title("60 s after a crash", fontsize=10)
    for share in sorted({row["share"] for row in result["scaling"]}):
        rows = [row for row in result["scaling"] if row["share"] == share]
        growth.plot(
            [100 * row["growth"] for row in rows],
            [max(_LEAST, row["gaps"]) for row in rows],
            "o-",
            label=f"target {share:.0%}",
        )
    growth.set(yscale="log", xlabel="growth in a minute, %", ylabel="utterances with a gap")
    growth.set_title("autoscaler, from 4 servers on", fontsize=10)
    for panel in (gaps, crashes, growth):
        panel.axhline(GAPS, color="grey", linestyle=":")
        panel.legend(fontsize=8)
    save_picture(figure, path, dpi=80)
