"""Soak of some seconds on a real server, as in `make soak`: one client in five misbehaves, and the
engine is killed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.crowd import Plan
from benchmarks.soak.server import soak
from benchmarks.soak.watch import read_server_log

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
    assert result["outages"]["engine killed"]


def end(engine: int, stream: int) -> str:
    return (
        f'I1128 14:35:03.349000 {engine} metrics.py:199] "stream={stream} reason=finished tokens=3 '
        'audio_s=0.12 underruns=1"'
    )


KILL = "token2wav: the engine was killed by signal SIGKILL; restarting the engine in 1 s"


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        ([end(1, 2), end(1, 1)], 0),
        ([end(1, 1), end(1, 1)], 1),
        ([end(1, 1), end(1, 3)], 1),
        ([end(1, 1), end(1, 4), KILL, end(2, 1)], 0),  # 2 and 3 were open
        ([end(1, 1), end(1, 6), KILL, end(2, 1)], 1),  # more than a limit of 2, and a canary
        ([end(1, 1), end(1, 1), KILL, end(2, 1)], 1),
        ([end(1, 1), KILL, end(2, 2)], 1),
        ([end(1, 1), "Traceback (most recent call last):"], 1),
    ],
)
def test_each_stream_in_the_log_ends_once_unless_its_engine_was_killed(
    lines: list[str], problems: int
) -> None:
    facts, found = read_server_log(lines, streams=2)
    assert len(found) == problems, found
    assert facts["underruns"] == sum("underruns" in line for line in lines)
    assert facts["restarts"] == ({"engine": 1} if KILL in lines else {})
