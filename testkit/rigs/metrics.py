"""Metrics of a server or a gateway, as its metrics port returns them."""

from __future__ import annotations

import re
import urllib.request


def scrape(url: str) -> dict[str, float]:
    """Returns every value of a metrics port, by name and labels in their original text.

    Args:
        url: host:port.
    """
    with urllib.request.urlopen(f"http://{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def labelled(metrics: dict[str, float], family: str) -> dict[str, float]:
    """Returns the values of a metric family with one label, by the value of the label."""
    pairs = (
        (re.fullmatch(rf'{family}\{{\w+="(.*)"\}}', name), value) for name, value in metrics.items()
    )
    return {match[1]: value for match, value in pairs if match}
