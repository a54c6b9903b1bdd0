"""Soaks of some seconds, as in `make soak`: clients misbehave, and servers fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import gateway, server
from benchmarks.soak.crowd import Plan

pytestmark = pytest.mark.slow


# With these seeds misdeeds of all kinds come within some seconds.
@pytest.mark.parametrize("model", ["cosyvoice3", "mimi", "snac_attention"])
def test_a_server(tmp_path: Path, model: str) -> None:
    """Well-behaved clients lose no sample, and no state is left behind.

    The check of memory growth needs a longer run.
    """
    plan = Plan(minutes=1 / 3, clients=12, seed=209, model=model)
    result = checked(server.soak(plan, tmp_path))
    assert result["misbehaved"].keys() == {"cancel", "vanish", "stall", "crowd", "garbage"}
    assert result["outages"]["engine killed"]


def test_a_gateway(tmp_path: Path) -> None:
    """Honest clients lose no sample, and the gateway keeps no descriptor, task or text."""
    result = checked(gateway.soak(Plan(minutes=0.4, clients=10, seed=3), tmp_path))
    assert result["misbehaved"].keys() == {"leave", "stall", "language model"}
    assert result["outages"]


def checked(result: dict[str, Any]) -> dict[str, Any]:
    assert result["problems"] == []
    assert result["behaved"]["utterances"] > 0
    return result
