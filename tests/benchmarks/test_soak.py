"""Soak of twenty seconds on a real server. One client in five misbehaves, as in `make soak`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.crowd import Plan
from benchmarks.soak.server import soak

# With this seed seven clients misbehave at first, so that every kind comes even where only few
# utterances fit.
PLAN = Plan(minutes=1 / 3, clients=12, seed=209)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cosyvoice3", "mimi", "snac_attention"])
def test_some_seconds_among_misbehaving_clients(tmp_path: Path, model: str) -> None:
    """Well-behaved clients lose no sample, and no state is left behind.

    The check of memory growth needs a longer run.
    """
    result = soak(replace(PLAN, model=model), tmp_path)
    assert result["problems"] == [], f"{PLAN}"
    assert result["misbehaved"].keys() == {"cancel", "vanish", "stall", "crowd", "garbage"}
    assert result["behaved"]["utterances"] > 0
