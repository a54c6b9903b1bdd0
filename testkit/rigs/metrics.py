"""Metrics of a server or a gateway, as its metrics port returns them."""

from __future__ import annotations

import re
import urllib.request

from testkit.patience import PATIENCE_SECONDS


def page(url: str) -> str:
    """Returns the text of a metrics port.

    Args:
        url: host:port.
    """
    with urllib.request.urlopen(f"http://{url}/metrics", timeout=PATIENCE_SECONDS) as response:
        text: str = response.read().decode()
    return text


def scrape(url: str) -> dict[str, float]:
    """Returns every value of a metrics port, by name and labels in their original text."""
    return values(page(url))


def values(text: str) -> dict[str, float]:
    """Reads the text of a metrics port."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    pairs = (line.rpartition(" ") for line in lines)
    return {name: float(value) for name, _, value in pairs}


def labelled(metrics: dict[str, float], family: str) -> dict[str, float]:
    """Returns the values of a metric family with one label, by the value of the label."""
    pairs = (
        (re.fullmatch(rf'{family}\{{\w+="(.*)"\}}', name), value) for name, value in metrics.items()
    )
    return {match[1]: value for match, value in pairs if match}
