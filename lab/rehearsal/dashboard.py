"""The dashboard without Grafana: a picture of the answers of a real Prometheus to all queries."""

from __future__ import annotations

import json
import math
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

from lab.png import save_picture
from testkit.rigs.queries import panels

STEP_SECONDS = 5
# Values of Grafana's variables for all servers, with this step and the interval of 10 s in
# prometheus.yml.
_VARIABLES = {"$__rate_interval": "40s", "$instance": ".*"}
_SCALES = {"percentunit": (100.0, " %"), "bytes": (1e-6, " MB"), "s": (1.0, " s")}
Series = list[tuple[dict[str, str], list[tuple[float, float]]]]


def ask(prometheus: str, expression: str, start: float, end: float) -> Series:
    """Queries Prometheus between two times.

    Returns:
        For every series, its labels and its finite values with their times.
    """
    question = {"query": expression, "start": start, "end": end, "step": STEP_SECONDS}
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(question)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        all_series: list[dict[str, Any]] = json.load(response)["data"]["result"]
    numbers = [
        (series["metric"], [(float(when), float(text)) for when, text in series["values"]])
        for series in all_series
    ]
    return [
        (labels, [pair for pair in pairs if math.isfinite(pair[1])]) for labels, pairs in numbers
    ]


def draw(prometheus: str, start: float, end: float, picture: Path) -> dict[str, int]:
    """Draws all panels at their positions on the dashboard.

    Returns:
        Count of the numbers in each panel, by id and title of the panel.
    """
    start = math.floor(start)  # so that times are whole numbers
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels())
    figure = plt.figure(figsize=(12, rows / 3.8))
    grid = figure.add_gridspec(
        rows, 24, left=0.04, right=0.985, top=0.975, bottom=0.01, wspace=9, hspace=0.5
    )
    shown = {}
    for panel in panels():
        position = panel["gridPos"]
        # the last row is for the numbers of the axis
        inner = slice(position["y"], position["y"] + position["h"] - 1)
        axes = figure.add_subplot(grid[inner, position["x"] : position["x"] + position["w"]])
        axes.set_title(panel["title"], loc="left", fontsize=8)
        factor, unit = _SCALES.get(panel["fieldConfig"]["defaults"].get("unit", ""), (1.0, ""))
        count = 0
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in _VARIABLES.items():
                expression = expression.replace(name, value)
            for labels, pairs in ask(prometheus, expression, start, end):
                count += len(pairs)
                if panel["type"] == "stat" and pairs:
                    axes.text(
                        0.5,
                        0.4,
                        f"{factor * pairs[-1][1]:.3g}{unit}",
                        ha="center",
                        va="center",
                        fontsize=20,
                    )
                elif pairs:
                    values = dict(pairs)
                    times = np.arange(start, end, STEP_SECONDS)
                    # keeps the gaps of the series
                    line = [factor * values.get(when, math.nan) for when in times]
                    axes.plot(
                        times - start,
                        line,
                        linewidth=1,
                        label=_legend(target.get("legendFormat", ""), labels),
                    )
        if panel["type"] == "stat":
            axes.set_axis_off()
        else:
            axes.tick_params(labelsize=6)
            axes.set_xlim(0, end - start)
            axes.set_ylabel(unit.strip(), fontsize=6)
            if count:
                axes.legend(fontsize=5, ncols=2, frameon=False)
        shown[f"{panel['id']} {panel['title']}"] = count
    save_picture(figure, picture, dpi=76)
    plt.close(figure)
    return shown


def _legend(template: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template
