"""Selection of the tokens of each chunk: pure arithmetic, without a network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from testkit.models.tiny_model import TINY, demo_voice, schedule_of
from testkit.replies import FakeClock
from token2wav import InputError, StreamConfig
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.serving.chunking import Chunker, TokenBuffer
from token2wav.serving.clocks import Playback
from token2wav.serving.hops import HopSchedule
from token2wav.stages.stage import TokenChunk

CONFIG = CosyVoice3Config.read(TINY)
# One token is a block, and hops are 1, 2 and 4 tokens.
CODEC = replace(
    CONFIG,
    stages=("decoder",),
    block_tokens=1,
    lookahead_tokens=0,
    hop_blocks=(1, 4),
    provisional_chunks=False,
)
LOOKAHEAD = 3
BLOCK = 25
NOTHING = np.zeros(0, np.int32)

prompts = st.integers(1, 120)
lengths = st.integers(1, 400)
policies = st.sampled_from(
    [
        StreamConfig(first_tokens=0),
        *(StreamConfig(first_tokens=0, max_hop_tokens=most) for most in (25, 50, 200)),
    ]
)


WHOLE_BLOCKS = StreamConfig(first_tokens=0)


def chunker_of(
    prompt: int, stream: StreamConfig = WHOLE_BLOCKS, playback: Playback | None = None
) -> Chunker:
    return Chunker(demo_voice(prompt).prompt_tokens, CONFIG, schedule_of(CONFIG, stream), playback)


def numbered(count: int, start: int = 0) -> NDArray[np.int32]:
    """Returns tokens with values that give their positions in the utterance."""
    return np.arange(start, start + count, dtype=np.int32)


def run(chunker: Chunker, portions: Iterable[int]) -> list[TokenChunk]:
    """Pushes portions of numbered tokens and ends; every chunk runs as soon as it can."""
    chunks: list[TokenChunk] = []
    at = 0

    def drain() -> None:
        while (chunk := chunker.next_chunk) is not None:
            chunks.append(chunk)
            chunker.finish_chunk()

    for portion in portions:
        chunker.push(numbered(portion, at))
        at += portion
        drain()
    chunker.push(NOTHING, end=True)
    drain()
    return chunks


def ranges(chunks: Iterable[TokenChunk]) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.stop, chunk.last) for chunk in chunks]


@given(prompts, st.lists(st.integers(0, 60), min_size=1, max_size=12), policies)
def test_chunks_cover_the_utterance_on_the_block_grid(
    prompt: int, portions: list[int], stream: StreamConfig
) -> None:
    count = sum(portions)
    if not count:
        portions, count = [1], 1
    chunks = run(chunker_of(prompt, stream), portions)
    total = prompt + count
    prefix = (prompt - LOOKAHEAD) // BLOCK * BLOCK if prompt >= LOOKAHEAD else 0

    assert chunks[0].start == prefix
    assert [chunk.start for chunk in chunks[1:]] == [chunk.stop for chunk in chunks[:-1]]
    assert chunks[-1].stop == total
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk.stop > chunk.start for chunk in chunks)
    assert all(chunk.stop % BLOCK == 0 for chunk in chunks[:-1])

    utterance = np.concatenate((demo_voice(prompt).prompt_tokens, numbered(count)))
    for chunk in chunks:
        right = 0 if chunk.last else LOOKAHEAD
        assert chunk.tokens.dtype == np.int32
        assert np.array_equal(chunk.tokens, utterance[chunk.start : chunk.stop + right])


@given(prompts, lengths, policies, st.data())
@settings(max_examples=40)
def test_the_chunks_do_not_depend_on_how_tokens_arrive(
    prompt: int, count: int, stream: StreamConfig, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=20)))
    portions = np.diff([0, *cuts, count]).tolist()
    at_once = run(chunker_of(prompt, stream), [count])
    one_by_one = run(chunker_of(prompt, stream), [1] * count)
    assert (
        ranges(run(chunker_of(prompt, stream), portions)) == ranges(at_once) == ranges(one_by_one)
    )


@given(prompts, lengths, policies)
@settings(max_examples=40)
def test_a_chunk_runs_when_its_lookahead_is_complete(
    prompt: int, count: int, stream: StreamConfig
) -> None:
    chunker = chunker_of(prompt, stream)
    for received in range(1, count + 1):
        chunker.push(numbered(1))
        chunk = chunker.next_chunk
        if chunk is None:
            continue
        assert prompt + received == chunk.stop + LOOKAHEAD
        assert not chunk.last
        chunker.finish_chunk()
        assert chunker.next_chunk is None


@pytest.mark.parametrize(
    ("prompt", "first"),
    [(1, 49), (24, 26), (25, 25), (26, 49), (30, 45), (50, 25), (74, 26), (75, 25)],
)
def test_the_first_chunk_completes_the_last_prompt_block(prompt: int, first: int) -> None:
    chunker = chunker_of(prompt)
    chunker.push(numbered(first + LOOKAHEAD - 1))
    assert chunker.next_chunk is None
    chunker.push(numbered(1))
    chunk = chunker.next_chunk
    assert chunk is not None
    assert chunk.stop == prompt + first


@pytest.mark.parametrize(
    ("stream", "hops"),
    [
        (StreamConfig(), [25, 50, 100, 100, 100]),
        (StreamConfig(max_hop_tokens=75), [25, 50, 75, 75]),
        (StreamConfig(max_hop_tokens=25), [25, 25, 25]),
        (StreamConfig(max_hop_tokens=200), [25, 50, 100, 200, 200]),
    ],
)
def test_hops_grow_where_all_tokens_are_there(stream: StreamConfig, hops: list[int]) -> None:
    chunks = run(chunker_of(50, stream), [sum(hops) + LOOKAHEAD])
    stops = [50, *(chunk.stop for chunk in chunks[:-1])]
    assert np.diff(stops).tolist() == hops
    assert chunks[-1].stop - chunks[-1].start == LOOKAHEAD


@pytest.mark.parametrize("count", [25, 26, 27, 28])
def test_no_stub_unless_the_lookahead_was_complete(count: int) -> None:
    whole, stub = [(0, 25 + count, True)], [(0, 50, False), (50, 53, True)]
    assert ranges(run(chunker_of(25), [count])) == (stub if count == 28 else whole)


# The rules of a chunker.


def test_a_decision_stands_until_its_chunk_is_computed() -> None:
    chunker = chunker_of(25)
    chunker.push(numbered(200))
    first = chunker.next_chunk
    chunker.push(numbered(200), end=True)
    assert chunker.next_chunk is first
    assert chunker.chunks == 0


def test_a_waiting_chunk_grows_up_to_its_hop_and_the_end() -> None:
    clock = FakeClock()
    playback = Playback(clock)
    chunker = Chunker(NOTHING, CODEC, HopSchedule.of(StreamConfig(), CODEC), playback)
    chunker.push(numbered(1))
    playback.sent(0.0)
    chunker.finish_chunk()
    lengths = []
    for _ in range(3):  # the listener is out of audio, so one token is enough for a chunk
        chunker.push(numbered(1))
        chunker.decide()
        lengths.append(chunker.next_tokens)
    assert lengths == [1, 2, 2]
    chunker.finish_chunk()
    assert ranges([chunk for chunk in [chunker.next_chunk] if chunk]) == [(3, 4, False)]
    chunker.push(NOTHING, end=True)
    chunker.decide()
    assert ranges([chunk for chunk in [chunker.next_chunk] if chunk]) == [(3, 4, True)]


def test_a_shortened_chunk_leaves_tokens_to_the_next_one() -> None:
    chunker = Chunker(NOTHING, CODEC, HopSchedule.of(StreamConfig(), CODEC))
    chunker.push(numbered(1 + 2 + 4))
    for _ in range(2):
        chunker.finish_chunk()
    chunker.shorten(1)
    shortened = chunker.next_chunk
    chunker.finish_chunk()
    chunker.push(NOTHING, end=True)
    chunks = [chunk for chunk in (shortened, chunker.next_chunk) if chunk]
    assert ranges(chunks) == [(3, 4, False), (4, 7, True)]
    assert np.concatenate([chunk.tokens for chunk in chunks]).tolist() == [3, 4, 5, 6]


def test_when_a_message_is_consumed() -> None:
    chunker = chunker_of(25)
    chunker.push(numbered(27))
    assert chunker.needs(52)
    chunker.push(numbered(2))
    assert chunker.needs(52)
    assert not chunker.needs(53)
    chunker.finish_chunk()
    assert chunker.needs(54)
    chunker.push(NOTHING, end=True)
    assert chunker.needs(54)  # of the end, which came with a later one


def test_a_stream_that_would_end_without_tokens_goes_on() -> None:
    chunker = chunker_of(25)
    with pytest.raises(InputError, match=r"^tokens: .*at least 1"):
        chunker.push(NOTHING, end=True)
    assert not chunker.ended
    chunker.push(numbered(1), end=True)
    assert ranges([chunk for chunk in [chunker.next_chunk] if chunk]) == [(0, 26, True)]


def test_windows_are_copies() -> None:
    chunkers = [chunker_of(25) for _ in range(2)]
    tokens = numbered(300)
    for chunker in chunkers:
        chunker.push(tokens)
    assert chunkers[0].next_chunk is not None
    chunkers[0].next_chunk.tokens[:] = -7
    chunkers[0].finish_chunk()
    assert chunkers[1].next_chunk is not None
    assert np.array_equal(tokens, numbered(300))
    assert chunkers[0].next_chunk is not None
    assert (chunkers[0].next_chunk.tokens >= 0).all()


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


def test_an_endless_stream_keeps_only_the_needed_tokens() -> None:
    buffer = TokenBuffer(np.arange(30, dtype=np.int32), CONFIG)
    room = len(buffer._tokens)
    for start in range(30, 100_000, 7):
        needed = max(0, start - 50)
        buffer.add(np.arange(start, start + 7, dtype=np.int32), needed)
        assert np.array_equal(buffer.copy(needed, start + 7), np.arange(needed, start + 7))
    assert len(buffer._tokens) == room
