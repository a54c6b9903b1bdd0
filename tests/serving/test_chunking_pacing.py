"""Hops that follow the listener: replayed at many paces of tokens, on a clock that is only counted
on.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.pacing import BUFFER_S, PACES, PATTERNS, policies, replay
from testkit.models.tiny_model import TINY
from testkit.replies import FakeClock
from token2wav import StreamConfig
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.serving.chunking import Chunker, TokenBuffer
from token2wav.serving.clocks import PipelineLoad, Playback
from token2wav.serving.hops import HopSchedule

FLOW = CosyVoice3Config.read(TINY)
GROWING, _, WAITING, PROVISIONAL = policies(FLOW).values()
FIRST, LOOKAHEAD = StreamConfig().first_tokens, StreamConfig().provisional_lookahead_tokens


@pytest.mark.parametrize("pattern", ["steady", "messages of 5"])
@pytest.mark.parametrize("schedule", [WAITING, PROVISIONAL], ids=["whole blocks", "provisional"])
def test_no_underruns_at_the_pace_of_speech_with_200_ms(
    schedule: HopSchedule, pattern: str
) -> None:
    for pace in (pace for pace in PACES if pace >= 25):
        assert replay(schedule, FLOW, pace, pattern).underruns == 0, pace


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_more_silence_than_with_growing_hops(pattern: str) -> None:
    for pace in PACES:
        grown, ours = (replay(schedule, FLOW, pace, pattern) for schedule in (GROWING, WAITING))
        assert ours.silent_s <= grown.silent_s
        provisional = replay(PROVISIONAL, FLOW, pace, pattern)
        assert provisional.first_s < 0.7 * ours.first_s
        # Where tokens come too slowly, silence comes later instead.
        assert provisional.first_s + provisional.silent_s <= ours.first_s + ours.silent_s + 0.1


@pytest.mark.parametrize("pace", [50, 100, 200])
def test_fast_tokens_one_provisional_chunk_then_hops(
    pace: float,
) -> None:
    heard = replay(PROVISIONAL, FLOW, pace)
    assert heard.provisional <= 0.06  # the first 12 of 250 tokens, or two more
    assert heard.chunks <= 11
    assert replay(WAITING, FLOW, pace).chunks <= 5


def test_first_audio_needs_the_first_tokens_and_their_lookahead() -> None:
    compute = 0.05 + 0.001 * 0.3 * (25 + FIRST)  # 3 of 10 ODE steps
    for pace in PACES:
        assert replay(PROVISIONAL, FLOW, pace).first_s == pytest.approx(
            (FIRST + LOOKAHEAD - 1) / pace + compute, abs=0.002
        )


def chunker_of(
    clock: FakeClock, first_tokens: int = FIRST, load: PipelineLoad | None = None, prompt: int = 75
) -> tuple[Chunker, Playback]:
    playback = Playback(clock, BUFFER_S)
    schedule = HopSchedule.of(StreamConfig(first_tokens=first_tokens), FLOW)
    return Chunker(np.zeros(prompt, np.int32), FLOW, schedule, playback, load), playback


def tokens(count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.zeros(count, np.int32)


def test_a_longer_hop_takes_more_time_than_the_latest_chunk() -> None:
    clock = FakeClock(0.0)
    chunker, playback = chunker_of(clock, first_tokens=0, prompt=0)
    chunker.push(tokens(28))
    clock.now = 0.2  # the time of a chunk of 25 tokens
    playback.sent(0.92)
    chunker.finish_chunk()
    clock.now = 0.5
    chunker.push(tokens(30))
    assert chunker.next_chunk is None
    # 0.77 s of audio are left. The hop of 50 tokens would be complete in 0.37 s, and would take
    # 0.4 s to compute. It would be in time if it took 0.2 s.
    clock.now = 0.55
    chunker.decide()
    assert chunker.next_chunk is not None
    assert (chunker.next_chunk.start, chunker.next_chunk.stop) == (25, 50)


@pytest.mark.parametrize(("block_seconds", "most"), [(0.05, 1), (0.35, 2)])
def test_provisional_chunks_while_a_whole_block_runs(block_seconds: float, most: int) -> None:
    """A whole block has more ODE steps, so the time of a provisional chunk does not estimate it."""
    clock, load = FakeClock(0.0), PipelineLoad()
    load.delayed(block_seconds, one_block=True)
    chunker, playback = chunker_of(clock, load=load, prompt=0)
    provisional = 0
    for count in range(1, 28):
        clock.now = 0.01 * count
        chunker.push(tokens(1))
        if (chunk := chunker.next_chunk) is not None:
            provisional += chunk.provisional
            playback.sent((chunk.stop - chunk.start - chunk.skip) / 25)
            chunker.finish_chunk()
    assert provisional == most


def test_a_waiting_provisional_chunk_becomes_a_block() -> None:
    chunker, _ = chunker_of(FakeClock(0.0))
    chunker.push(tokens(15))
    assert chunker.next_chunk is not None
    assert chunker.next_chunk.stop == 75 + 15 - LOOKAHEAD
    chunker.push(tokens(13))
    chunker.decide()
    assert (chunker.next_chunk.stop, chunker.next_chunk.provisional) == (100, False)


def test_separate_estimates_for_provisional_and_whole_chunks() -> None:
    clock, load = FakeClock(0.0), PipelineLoad()
    chunker, _ = chunker_of(clock, load=load)
    chunker.push(tokens(15))
    clock.now = 0.3  # the time of a provisional chunk
    chunker.finish_chunk()
    estimates = chunker._facts(clock.now).estimates
    assert estimates.seconds_to_compute(1, provisional=True) == pytest.approx(0.3)
    assert estimates.seconds_to_compute(25) == load.delay_seconds < 0.3


def test_whole_blocks_make_room_for_a_provisional_stream() -> None:
    load = PipelineLoad()
    for _ in range(2):
        load.record_batch(1, 0.04)
    other, _ = chunker_of(FakeClock(0.0), load=load)
    chunker, _ = chunker_of(FakeClock(0.0), load=load)
    chunker.push(tokens(15))
    chunker.finish_chunk()  # the first tokens
    chunker.push(tokens(100))
    chunker.finish_chunk()  # up to the first block's end
    assert not load.try_admit_provisional(other)
    chunker.finish_chunk()  # the next block as a whole
    assert load.try_admit_provisional(other)


def test_a_first_chunk_without_audio_then_another_soon() -> None:
    chunker, _ = chunker_of(FakeClock(0.0))
    chunker.push(tokens(15))
    chunker.finish_chunk(heard=False)  # silence that was trimmed
    chunker.push(tokens(12))
    assert chunker.next_chunk is not None
    assert chunker.next_chunk.stop == 99


def test_an_endless_stream_keeps_only_the_needed_tokens() -> None:
    buffer = TokenBuffer(np.arange(30, dtype=np.int32), FLOW)
    room = len(buffer._tokens)
    for start in range(30, 100_000, 7):
        needed = max(0, start - 50)
        buffer.add(np.arange(start, start + 7, dtype=np.int32), needed)
        assert np.array_equal(buffer.copy(needed, start + 7), np.arange(needed, start + 7))
    assert len(buffer._tokens) == room
