"""End of the next chunk, one row for each kind of chunk."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from token2wav.config.block_grid import BlockGrid
from token2wav.serving.hops import HopSchedule
from token2wav.serving.next_stop import ChunkTime, Estimates, Stop, StreamFacts, next_stop

LOOKAHEAD, BLOCK = 3, 25
TOKEN_S = 1 / 25  # of audio, and from one token to the next
# chunks of any length take 20 ms
ESTIMATES = Estimates(TOKEN_S, TOKEN_S, ChunkTime(), ChunkTime(), delay_seconds=0.02)


def facts(received: int, first_tokens: int = 6, **changes: Any) -> StreamFacts:
    """Facts of a stream without a prompt, of which `received` tokens have arrived."""
    schedule = HopSchedule(25, 100, BLOCK, first_tokens, provisional_lookahead=2)
    values: dict[str, Any] = {"start": 0, "spoken": 0, "ended": False, "hops": 0, "heard": False}
    values |= {"lead": inf, "estimates": ESTIMATES} | changes
    return StreamFacts(
        schedule, BlockGrid(BLOCK), LOOKAHEAD, 0, TOKEN_S, received=received, **values
    )


HEARD = {"start": 25, "spoken": 25, "hops": 1, "heard": True}


@pytest.mark.parametrize(
    ("stream", "stop"),
    [
        pytest.param(facts(28), Stop(25), id="first hop"),
        pytest.param(facts(53 + 25, **HEARD), Stop(75), id="second hop has two blocks"),
        pytest.param(facts(10, ended=True), Stop(10), id="end"),
        pytest.param(facts(7), None, id="too few for early audio"),
        pytest.param(facts(8), Stop(6, needs_admission=True), id="early audio"),
        pytest.param(facts(27, first_tokens=0), None, id="no early audio wanted"),
        pytest.param(facts(60, lead=3.0, **HEARD), None, id="the listener can wait for the hop"),
        pytest.param(facts(60, lead=0.5, **HEARD), Stop(50), id="complete blocks"),
        pytest.param(facts(30, lead=2.0, **HEARD), None, id="the listener can wait for the block"),
        pytest.param(
            facts(38, lead=0.4, **HEARD), Stop(33, needs_admission=True), id="provisional"
        ),
        pytest.param(facts(38, lead=-0.1, **HEARD), None, id="too late for a provisional chunk"),
    ],
)
def test_next_stop(stream: StreamFacts, stop: Stop | None) -> None:
    assert next_stop(stream) == stop


@pytest.mark.parametrize(
    ("tokens", "provisional", "seconds"),
    [
        pytest.param(50, False, 0.4, id="twice the tokens of the known chunk"),
        pytest.param(5, False, 0.2, id="a shorter chunk takes as long"),
        pytest.param(8, True, 0.1, id="provisional"),
        pytest.param(1, True, 0.05, id="no less than the mean of all streams"),
    ],
)
def test_time_to_compute(tokens: int, provisional: bool, seconds: float) -> None:
    estimates = Estimates(TOKEN_S, TOKEN_S, ChunkTime(0.2, 25), ChunkTime(0.025, 2), 0.05)
    assert estimates.seconds_to_compute(tokens, provisional=provisional) == pytest.approx(seconds)
