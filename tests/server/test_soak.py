"""A minute of the soak: clients of whom one in five misbehaves, on a real server (`make soak`)."""

from __future__ import annotations

from pathlib import Path

from tests.soak.run import Plan, soak

PLAN = Plan(minutes=1.0, clients=12, seed=5)


def test_a_minute_among_misbehaving_clients(tmp_path: Path) -> None:
    """Nobody else loses a sample; nothing is held or left behind. Memory needs a longer run."""
    result = soak(PLAN, tmp_path)
    assert result["problems"] == [], f"{PLAN}"
    assert result["misbehaved"].keys() == {"cancel", "vanish", "stall", "garbage"}
    assert result["behaved"]["utterances"] > 0
