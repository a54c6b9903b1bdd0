"""Schedule of hops, from settings and sizes of a model; end of the next chunk, one row for each of
its kinds.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from testkit.models.tiny_model import TINY
from token2wav import ConfigError, StreamConfig
from token2wav.config.block_grid import BlockGrid
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.serving.hops import (
    ChunkTime,
    Estimates,
    HopSchedule,
    Stop,
    StreamFacts,
    next_stop,
    waiting_seconds,
)

CONFIG = CosyVoice3Config.read(TINY)


@pytest.mark.parametrize(("withheld_tokens", "expected"), [(0, 6), (3, 6), (4, 7), (10, 13)])
def test_a_first_chunk_has_audio_for_half_of_its_tokens(
    withheld_tokens: int, expected: int
) -> None:
    withheld = withheld_tokens * CONFIG.samples_per_token
    schedule = HopSchedule.of(StreamConfig(first_tokens=6), CONFIG, withheld)
    assert schedule.first_tokens == expected
    assert schedule.least_tokens == 3


def test_no_provisional_chunks_with_fixed_ends() -> None:
    for stream in (StreamConfig(first_tokens=0), StreamConfig(reference=True)):
        assert HopSchedule.of(stream, CONFIG).first_tokens == 0
    assert not HopSchedule.of(StreamConfig(reference=True), CONFIG).adaptive


def test_provisional_chunks_need_no_more_lookahead_than_others() -> None:
    many = StreamConfig(provisional_lookahead_tokens=9)
    assert HopSchedule.of(many, CONFIG).provisional_lookahead == CONFIG.lookahead_tokens == 3


@pytest.mark.parametrize(("longest", "words"), [(90, "is not a multiple"), (0, "is below")])
def test_a_longest_hop_that_cannot_be(longest: int, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"stream\.max_hop_tokens: {longest} {words}"):
        HopSchedule(25, longest, 25)


LOOKAHEAD, BLOCK = 3, 25
TOKEN_S = 1 / 25  # of audio, and from one token to the next
# chunks of any length take 20 ms
ESTIMATES = Estimates(TOKEN_S, TOKEN_S, ChunkTime(), ChunkTime(), delay_seconds=0.02)


def facts(received: int, first_tokens: int = 6, **changes: Any) -> StreamFacts:
    """Facts of a stream without a prompt, of which `received` tokens have arrived."""
    schedule = HopSchedule(25, 100, BLOCK, first_tokens, provisional_lookahead=2)
    values: dict[str, Any] = {"start": 0, "spoken": 0, "ended": False, "hops": 0, "heard": False}
    values |= {"lead": inf, "estimates": ESTIMATES, "optional_lookahead": 0} | changes
    return StreamFacts(
        schedule, BlockGrid(BLOCK), LOOKAHEAD, audio_seconds=TOKEN_S, received=received, **values
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


@pytest.mark.parametrize(("received", "stop"), [(29, 29), (30, 25)])
def test_the_last_chunk_takes_the_optional_lookahead_of_the_chunk_before_it(
    received: int, stop: int
) -> None:
    """Alone, the last chunk must have the optional look-ahead of 5 tokens."""
    assert next_stop(facts(received, ended=True, optional_lookahead=5)) == Stop(stop)


@pytest.mark.parametrize(
    ("stream", "seconds"),
    [
        pytest.param(facts(7), inf, id="too few for early audio"),
        pytest.param(facts(30, first_tokens=0, lead=2.0, **HEARD), inf, id="no block is complete"),
        pytest.param(facts(38, lead=-0.1, **HEARD), inf, id="the listener has run out of audio"),
        pytest.param(facts(38, lead=3.0, **HEARD), 0.0, id="a provisional chunk may come"),
    ],
)
def test_time_of_waiting(stream: StreamFacts, seconds: float) -> None:
    assert next_stop(stream) is None
    assert waiting_seconds(stream) == seconds


def test_a_stream_waits_until_its_listener_needs_the_complete_blocks() -> None:
    seconds = waiting_seconds(facts(60, lead=3.0, **HEARD))
    assert 0 < seconds < 3
    assert next_stop(facts(60, lead=3.0 - seconds + 0.001, **HEARD)) is None
    assert next_stop(facts(60, lead=3.0 - seconds - 0.001, **HEARD)) == Stop(50)


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
