"""End of the next chunk, and what it depends on: schedule of hops, plan of provisional chunks,
arrivals of tokens, playback, and load of the workers.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from testkit.models.tiny_model import TINY
from testkit.replies import FakeClock
from token2wav import ConfigError, StreamConfig
from token2wav.config.block_grid import BlockGrid
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.serving.clocks import SLOW_SECONDS, Arrivals, PipelineLoad, Playback
from token2wav.serving.hops import (
    ChunkTime,
    Estimates,
    HopSchedule,
    Stop,
    StreamFacts,
    next_stop,
)
from token2wav.serving.provisional import Pace, next_end

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
        pytest.param(facts(7), inf, id="too few for early audio"),
        pytest.param(facts(8), Stop(6, needs_admission=True), id="early audio"),
        pytest.param(facts(27, first_tokens=0), inf, id="no early audio wanted"),
        pytest.param(facts(60, lead=0.5, **HEARD), Stop(50), id="complete blocks"),
        pytest.param(facts(30, first_tokens=0, lead=2.0, **HEARD), inf, id="no complete block"),
        pytest.param(facts(30, lead=2.0, **HEARD), 0.0, id="the listener can wait for the block"),
        pytest.param(
            facts(38, lead=0.4, **HEARD), Stop(33, needs_admission=True), id="provisional"
        ),
        pytest.param(facts(38, lead=3.0, **HEARD), 0.0, id="a provisional chunk may come"),
        pytest.param(facts(38, lead=-0.1, **HEARD), inf, id="too late for a provisional chunk"),
    ],
)
def test_next_stop(stream: StreamFacts, stop: Stop | float) -> None:
    assert next_stop(stream) == stop


@pytest.mark.parametrize(("received", "stop"), [(29, 29), (30, 25)])
def test_the_last_chunk_takes_the_optional_lookahead_of_the_chunk_before_it(
    received: int, stop: int
) -> None:
    """Alone, the last chunk must have the optional look-ahead of 5 tokens."""
    assert next_stop(facts(received, ended=True, optional_lookahead=5)) == Stop(stop)


def test_a_stream_waits_until_its_listener_needs_the_complete_blocks() -> None:
    seconds = next_stop(facts(60, lead=3.0, **HEARD))
    assert isinstance(seconds, float)
    assert 0 < seconds < 3
    later = next_stop(facts(60, lead=3.0 - seconds + 0.001, **HEARD))
    assert later == pytest.approx(0.001)
    assert next_stop(facts(60, lead=3.0 - seconds - 0.001, **HEARD)) == Stop(50)


# Plan of provisional chunks.


def ends(audio_left: int) -> list[int]:
    """Returns the ends of the chunks of one block, at the pace of speech. The audio of the whole
    block comes two tokens later than that of a provisional chunk with the same end.

    Args:
        audio_left: tokens of audio that the listener has left when a chunk could end at the
            listener's position.
    """
    pace, chunk_ends, spoken = Pace(TOKEN_S, TOKEN_S, 0.0), list[int](), 0
    # The listener and the language model both advance by one token.
    for arrived in range(BLOCK):
        lead = (spoken + audio_left - arrived) * TOKEN_S
        assert lead >= 0
        end = next_end(pace, spoken, arrived, lead, (BLOCK + 2 - arrived) * TOKEN_S)
        if spoken < end <= arrived:
            chunk_ends.append(end)
            spoken = end
    assert spoken + audio_left >= BLOCK
    return chunk_ends


def test_chunks_end_early_in_their_block_and_never_too_late() -> None:
    # one token more than in the example of the docstring, because of the slack
    assert ends(audio_left=8) == [6, 13, 20]
    assert ends(audio_left=20) == [8]


def test_no_chunk_is_needed_if_the_audio_lasts_until_the_block() -> None:
    pace = Pace(TOKEN_S, TOKEN_S, 0.05)
    assert next_end(pace, spoken=8, arrived=10, lead=0.5, block_seconds=0.5) == 8
    assert next_end(pace, spoken=8, arrived=10, lead=0.5, block_seconds=0.51) > 8
    assert next_end(pace, spoken=8, arrived=10, lead=float("inf"), block_seconds=9.0) == 8


@pytest.mark.parametrize("token_seconds", [0.08, 0.2])
def test_tokens_that_come_too_slowly_have_no_plan(token_seconds: float) -> None:
    pace = Pace(token_seconds, TOKEN_S, 0.05)
    assert next_end(pace, spoken=0, arrived=0, lead=0.1, block_seconds=25 * token_seconds) == 0


# Clocks, and the load of the workers.


def test_playback_clock_from_the_first_audio_and_its_buffer() -> None:
    clock = FakeClock()
    playback = Playback(clock, buffer_seconds=0.3)
    assert (playback.sent(1.0), playback.plays_until) == (0.0, 5001.3)
    clock.now += 1.2
    assert (playback.sent(1.0), playback.plays_until) == (0.0, 5002.3)
    clock.now += 1.5
    assert playback.sent(0.5) == pytest.approx(0.4)  # the listener was silent for as long
    assert playback.plays_until == pytest.approx(5003.2)
    assert (playback.started, playback.seconds_sent, playback.underruns) == (5000.0, 2.5, 1)


class Stream:
    """Stream that asks for provisional chunks."""


@pytest.mark.parametrize(
    ("batches", "most"), [({1: 0.02}, 2), ({1: 0.02, 3: 0.04}, 3), ({1: 0.005, 9: 0.006}, 100)]
)
def test_streams_that_the_workers_compute_in_time(batches: dict[int, float], most: int) -> None:
    load = PipelineLoad()
    load.record_batch(1, 3.0)  # the first measurement does not count
    for _ in range(100):
        for chunks, seconds in batches.items():
            load.record_batch(chunks, seconds)
    streams = [Stream() for _ in range(100)]
    assert sum(load.try_admit_provisional(stream) for stream in streams) == most
    assert load.provisional_streams == most
    del streams
    assert load.try_admit_provisional(Stream())  # the others are gone


def test_no_stream_is_admitted_while_chunks_take_long() -> None:
    load, stream = PipelineLoad(), Stream()
    assert load.try_admit_provisional(stream)
    for _ in range(30):
        load.delayed(2 * SLOW_SECONDS)
    assert not load.try_admit_provisional(stream)


def test_arrivals_tell_pace_and_rhythm() -> None:
    arrivals = Arrivals()
    assert arrivals.token_seconds(3.0) == 0
    for at in (1.0, 1.2, 1.4):
        arrivals.add(5, at)
    assert arrivals.token_seconds(1.4) == pytest.approx(0.04)
    assert arrivals.token_seconds(1.8) == pytest.approx(0.08)  # a stall slows them down
    assert arrivals.seconds_until_next(1.5) == pytest.approx(0.1)
    assert arrivals.seconds_until_next(2.0) == 0
