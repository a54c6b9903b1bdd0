"""Plot of the losses of all trainings: `python -m lab.demo_voice.loss_plot --data DIR`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

from lab.demo_voice.folder import TRAINING

mpl.use("Agg")
from matplotlib import pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description="Plot the losses of the demo voice's trainings.")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="data folder of the recipe"
    )
    print(plot_losses(parser.parse_args().data / TRAINING))


def plot_losses(folder: Path) -> Path:
    """Draws a panel for every log in a folder, a line for every loss."""
    logs = sorted(folder.glob("*.jsonl"))
    figure, panels = plt.subplots(
        1, len(logs), figsize=(6 * len(logs), 4), squeeze=False, layout="constrained"
    )
    for panel, path in zip(panels[0], logs, strict=True):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for name in lines[0].keys() - {"step", "seconds_per_step"}:
            panel.plot(
                [line["step"] for line in lines],
                [line[name] for line in lines],
                label=name,
                linewidth=0.8,
            )
        panel.set(title=path.stem, xlabel="step", yscale="log")
        panel.legend()
    figure.savefig(folder / "losses.png", dpi=100)
    plt.close(figure)
    return folder / "losses.png"


if __name__ == "__main__":
    main()
