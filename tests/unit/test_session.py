"""Which tokens run when: pure arithmetic, without a network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.material import TINY, demo_voice, schedule_of
from token2wav import ConfigError, InputError, StreamClosedError, StreamConfig
from token2wav.execution.stages import FlowChunk
from token2wav.model_config import ModelConfig
from token2wav.streaming.accumulator import TokenAccumulator
from token2wav.streaming.hops import HopSchedule
from token2wav.streaming.session import Session

CONFIG = ModelConfig.read(TINY)
LOOKAHEAD = 3
BLOCK = 25
NOTHING = np.zeros(0, np.float32)

Policy = Literal["growing", "fixed", "lead"]

prompts = st.integers(1, 120)
lengths = st.integers(1, 400)
policies = st.sampled_from(
    [StreamConfig(), StreamConfig(hop="fixed"), StreamConfig(hop_tokens=50), StreamConfig(max_hop_tokens=25)]
)


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def session_of(prompt: int, stream: StreamConfig | None = None, clock: FakeClock | None = None) -> Session:
    return Session(demo_voice(prompt), CONFIG, schedule_of(CONFIG, stream), 1, 1, clock or FakeClock())


def numbered(count: int, start: int = 0) -> NDArray[np.int32]:
    """Tokens that say where they are in the utterance."""
    return np.arange(start, start + count, dtype=np.int32)


def run(session: Session, portions: Iterable[int]) -> list[FlowChunk]:
    """Pushes portions of numbered tokens and ends; every chunk runs as soon as it can."""
    chunks: list[FlowChunk] = []
    at = 0

    def drain() -> None:
        while (chunk := session.next_chunk()) is not None:
            chunks.append(chunk)
            session.sent(chunk, NOTHING)

    for portion in portions:
        session.push(numbered(portion, at))
        at += portion
        drain()
    session.end()
    drain()
    return chunks


def ranges(chunks: Iterable[FlowChunk]) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.stop, chunk.last) for chunk in chunks]


@given(prompts, st.lists(st.integers(0, 60), min_size=1, max_size=12), policies)
def test_chunks_cover_the_utterance_on_the_block_grid_with_their_context(
    prompt: int, portions: list[int], stream: StreamConfig
) -> None:
    count = sum(portions)
    if not count:
        portions, count = [1], 1
    chunks = run(session_of(prompt, stream), portions)
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
        assert chunk.left == min(2, chunk.start)
        assert chunk.tokens.dtype == np.int32
        assert np.array_equal(chunk.tokens, utterance[chunk.start - chunk.left : chunk.stop + right])


@given(prompts, lengths, policies, st.data())
def test_the_chunks_do_not_depend_on_how_tokens_arrive(
    prompt: int, count: int, stream: StreamConfig, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=20)))
    portions = np.diff([0, *cuts, count]).tolist()
    at_once = run(session_of(prompt, stream), [count])
    one_by_one = run(session_of(prompt, stream), [1] * count)
    assert ranges(run(session_of(prompt, stream), portions)) == ranges(at_once) == ranges(one_by_one)


@given(prompts, lengths, policies)
@settings(max_examples=40)
def test_a_chunk_runs_at_the_very_token_that_completes_its_lookahead(
    prompt: int, count: int, stream: StreamConfig
) -> None:
    session = session_of(prompt, stream)
    for received in range(1, count + 1):
        session.push([0])
        chunk = session.next_chunk()
        if chunk is None:
            continue
        assert prompt + received == chunk.stop + LOOKAHEAD
        assert not chunk.last
        session.sent(chunk, NOTHING)
        assert session.next_chunk() is None


@pytest.mark.parametrize(
    ("prompt", "first"), [(1, 49), (24, 26), (25, 25), (26, 49), (30, 45), (50, 25), (74, 26), (75, 25)]
)
def test_the_first_chunk_has_a_hop_and_what_the_prompt_lacks_to_a_block(prompt: int, first: int) -> None:
    session = session_of(prompt)
    session.push(np.zeros(first + LOOKAHEAD - 1, np.int32))
    assert session.next_chunk() is None
    session.push([0])
    chunk = session.next_chunk()
    assert chunk is not None
    assert chunk.stop == prompt + first


@pytest.mark.parametrize(
    ("stream", "hops"),
    [
        (StreamConfig(), [25, 50, 100, 100, 100]),
        (StreamConfig(max_hop_tokens=75), [25, 50, 75, 75]),
        (StreamConfig(hop_tokens=50), [50, 100, 100]),
        (StreamConfig(hop="fixed"), [25, 25, 25, 25]),
        (StreamConfig(hop="fixed", hop_tokens=50), [50, 50, 50]),
    ],
)
def test_hops_of_the_policies_that_count_chunks(stream: StreamConfig, hops: list[int]) -> None:
    chunks = run(session_of(50, stream), [sum(hops) + LOOKAHEAD])
    stops = [50, *(chunk.stop for chunk in chunks[:-1])]
    assert np.diff(stops).tolist() == hops
    assert chunks[-1].stop - chunks[-1].start == LOOKAHEAD


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_an_utterance_that_ends_within_the_lookahead_of_a_chunk_has_no_stub(extra: int) -> None:
    chunks = run(session_of(25), [25 + extra])
    assert ranges(chunks) == [(0, 50 + extra, True)]


def test_an_utterance_that_ends_with_the_lookahead_of_a_chunk_has_a_stub_of_it() -> None:
    assert ranges(run(session_of(25), [28])) == [(0, 50, False), (50, 53, True)]


def test_what_is_computed_with_the_prompt_is_whole_blocks_with_their_lookahead() -> None:
    prefixes = {prompt: CONFIG.flow.prefix_tokens(prompt) for prompt in (1, 2, 3, 25, 27, 28, 52, 53, 103)}
    assert prefixes == {1: 0, 2: 0, 3: 0, 25: 0, 27: 0, 28: 25, 52: 25, 53: 50, 103: 100}


# The policy that follows the lead over playback.


def lead_stops(seconds_between_chunks: float) -> list[int]:
    """Stops of the chunks of a stream whose listener hears it while it is computed."""
    clock = FakeClock()
    session = session_of(50, StreamConfig(hop="lead"), clock)
    session.push(np.zeros(1000, np.int32))
    stops = [50]
    for _ in range(5):
        chunk = session.next_chunk()
        assert chunk is not None
        session.sent(chunk, NOTHING)
        stops.append(chunk.stop)
        clock.now += seconds_between_chunks
    return stops


def test_lead_takes_as_many_tokens_as_audio_is_ahead() -> None:
    # Nothing is heard meanwhile: 25 tokens ahead, then 50, 100, and the bound.
    assert np.diff(lead_stops(0.0)).tolist() == [25, 25, 50, 100, 100]


def test_lead_falls_back_to_the_shortest_hop_when_there_is_none() -> None:
    assert np.diff(lead_stops(1.0)).tolist() == [25] * 5  # all audio has been heard when the next chunk runs
    assert np.diff(lead_stops(60.0)).tolist() == [25] * 5


def test_lead_shrinks_with_playback() -> None:
    clock = FakeClock()
    session = session_of(50, StreamConfig(hop="lead"), clock)
    session.push(np.zeros(1000, np.int32))
    start = 50
    for _ in range(4):
        chunk = session.next_chunk()
        assert chunk is not None
        session.sent(chunk, NOTHING)
        start = chunk.stop
    assert start == 250  # 200 tokens are ahead of playback

    def hop() -> int:
        upcoming = session.next_chunk()
        assert upcoming is not None
        return upcoming.stop - start

    assert hop() == 100
    clock.now += 4.5  # 112.5 tokens are heard, 87.5 are ahead
    assert hop() == 75
    clock.now += 1.5
    assert hop() == 50
    clock.now += 100
    assert hop() == 25


def test_lead_counts_from_the_first_chunk_that_was_sent_not_from_the_start() -> None:
    clock = FakeClock()
    session = session_of(50, StreamConfig(hop="lead"), clock)
    clock.now += 100  # the first tokens were slow to come
    session.push(np.zeros(400, np.int32))
    for expected in (75, 100, 150):
        chunk = session.next_chunk()
        assert chunk is not None
        assert chunk.stop == expected
        session.sent(chunk, NOTHING)


@given(st.integers(1, 30), st.floats(-1e6, 1e6), st.sampled_from(["growing", "fixed", "lead"]))
def test_every_hop_is_whole_blocks_within_its_bounds(index: int, lead: float, policy: Policy) -> None:
    hop = HopSchedule(policy, first=50, longest=200, block=25).hop(index, lead)
    assert hop % 25 == 0
    assert 50 <= hop <= 200


@pytest.mark.parametrize(
    ("stream", "field", "value"),
    [
        (StreamConfig(hop_tokens=30), "stream.hop_tokens", "30"),
        (StreamConfig(hop_tokens=12), "stream.hop_tokens", "12"),
        (StreamConfig(max_hop_tokens=110), "stream.max_hop_tokens", "110"),
    ],
)
def test_a_hop_off_the_block_grid_is_refused(stream: StreamConfig, field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: {value} is not a multiple .* 25 tokens$"):
        HopSchedule.of(stream, CONFIG.flow)


# The rules of a session.


def test_asking_for_the_next_chunk_changes_nothing() -> None:
    session = session_of(25)
    session.push(numbered(200))
    first, second = session.next_chunk(), session.next_chunk()
    assert first is not None
    assert second is not None
    assert ranges([first]) == ranges([second])
    assert np.array_equal(first.tokens, second.tokens)
    assert session.chunks_sent == 0


def test_chunks_are_numbered_and_the_last_one_is_final() -> None:
    session = session_of(25)
    session.push(numbered(100))
    session.end()
    sent = []
    while (chunk := session.next_chunk()) is not None:
        sent.append(session.sent(chunk, NOTHING))
    assert [chunk.index for chunk in sent] == [0, 1, 2]
    assert [chunk.final for chunk in sent] == [False, False, True]
    assert session.done


def test_a_refused_push_leaves_the_session_as_it_was() -> None:
    session = session_of(25)
    session.push(numbered(10))
    for bad in ([5, -1], [6561], [[1]], [1.5]):
        with pytest.raises(InputError, match=r"^tokens: "):
            session.push(bad)
    assert session.tokens_received == 10
    assert not session.ended


def test_a_session_that_ended_takes_nothing() -> None:
    session = session_of(25)
    with pytest.raises(InputError, match=r"^tokens: .*at least 1"):
        session.end()
    session.push([1])
    session.end()
    with pytest.raises(StreamClosedError, match="ended"):
        session.push([1])
    with pytest.raises(StreamClosedError, match="ended"):
        session.end()


def test_windows_are_copies_that_later_tokens_do_not_change() -> None:
    accumulator = TokenAccumulator(numbered(25), CONFIG.flow)
    accumulator.append(numbered(28, 25))
    window = accumulator.window(0, 50, last=False)
    before = window.tokens.copy()
    window.tokens[:] = -7
    assert np.array_equal(accumulator.window(0, 50, last=False).tokens, before)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=8))
def test_the_accumulator_keeps_every_token_while_it_grows(portions: list[int]) -> None:
    accumulator = TokenAccumulator(numbered(4), CONFIG.flow)
    for portion in portions:
        accumulator.append(numbered(portion, accumulator.count))
    assert accumulator.count == 4 + sum(portions)
    assert np.array_equal(accumulator.window(0, accumulator.count, last=True).tokens, numbered(accumulator.count))
