"""Streams of chunks in sliding windows against the whole utterance computed at once."""

from __future__ import annotations

import numpy as np
import pytest

from testkit.utterances import off, portions
from tests.families.streamflow.rig import (
    BANDS,
    BLOCK,
    MEL,
    RATIO,
    GuidedStream,
    Parts,
    a_voice,
    chunks_of,
    flow_config,
    some_tokens,
    spoken,
    stream_mel,
)
from token2wav import StreamConfig

ASSIGNMENTS = [((2, 4), (1,)), ((2, 4), (1, 5)), ((3,), ()), ((), (2,))]


@pytest.mark.parametrize(("backward", "forward"), ASSIGNMENTS)
def test_whole_utterance_by_hand(backward: tuple[int, ...], forward: tuple[int, ...]) -> None:
    parts = Parts.random(flow_config(backward=backward, forward=forward))
    tokens, voice = some_tokens(45), a_voice()
    for streaming in (True, False):
        whole = parts.engine().whole(tokens, voice, streaming=streaming).numpy()
        assert off(whole, parts.by_hand(tokens, voice)) <= MEL


@pytest.mark.parametrize(("backward", "forward"), ASSIGNMENTS)
def test_one_evaluation_in_a_window_is_that_of_the_whole(
    backward: tuple[int, ...], forward: tuple[int, ...]
) -> None:
    """The window has the past and future blocks of the assignment, and no more."""
    parts = Parts.random(flow_config(backward=backward, forward=forward, steps=1))
    tokens, voice = some_tokens(20 * BLOCK + 1), a_voice()
    assert off(stream_mel(parts, portions(tokens, [7]), voice), parts.by_hand(tokens, voice)) <= MEL


def test_the_published_window_is_each_chunk_with_its_blocks() -> None:
    """Blocks in reach of one evaluation go through all steps beside the chunk, as if nothing were
    beyond them.
    """
    parts = Parts.random(flow_config())
    count, voice = 11 * BLOCK + 4, a_voice()
    tokens = some_tokens(count)
    expected, start = [], 0
    while start < count:
        stop = start + 2 * BLOCK
        last = stop + BLOCK > count  # the one future block is missing
        stop, end = (count, count) if last else (stop, stop + BLOCK)
        begin = max(0, start - 2 * BLOCK)
        window = parts.by_hand(tokens[begin:end], voice, begin // BLOCK)
        expected.append(window[:, RATIO * (start - begin) : RATIO * (stop - begin)])
        start = stop
    by_window = np.concatenate(expected, axis=1)
    for size in (1, 5, 29, count):
        assert off(stream_mel(parts, portions(tokens, [size]), voice), by_window) <= MEL
    # All steps together depend on more than the window holds.
    assert off(by_window, parts.by_hand(tokens, voice)) > 10 * MEL


@pytest.mark.parametrize("count", [1, BLOCK, 3 * BLOCK, 6 * BLOCK, 6 * BLOCK + 1, 50])
def test_any_length(count: int) -> None:
    parts, voice, tokens = Parts.random(flow_config(steps=1)), a_voice(), some_tokens(count)
    mel = stream_mel(parts, portions(tokens, [5]), voice)
    assert mel.shape[1] == RATIO * count
    assert off(mel, parts.by_hand(tokens, voice)) <= MEL


@pytest.mark.parametrize("stream", [StreamConfig(), StreamConfig(max_hop_tokens=8 * BLOCK)])
def test_hops_make_no_difference_to_one_evaluation(stream: StreamConfig) -> None:
    parts, voice, tokens = (
        Parts.random(flow_config(steps=1)),
        a_voice(),
        some_tokens(22 * BLOCK + 5),
    )
    assert off(stream_mel(parts, [tokens], voice, stream), parts.by_hand(tokens, voice)) <= MEL


def test_every_chunk_costs_the_same() -> None:
    utterance = GuidedStream(Parts.random(flow_config()), a_voice())
    utterance.push(some_tokens(30 * BLOCK))
    width = 2 + 2 + 1
    assert set(utterance.windows[5:]) == {width * BLOCK}
    assert max(utterance.windows) == width * BLOCK
    utterance.finish()


def test_first_audio_waits_for_chunk_and_look_ahead() -> None:
    utterance = GuidedStream(Parts.random(flow_config()), a_voice())
    needed = 3 * BLOCK
    for count in range(1, needed + 1):
        utterance.push(some_tokens(1, count))
        assert len(utterance.windows) == (count == needed)
    utterance.finish()


def test_batched_equals_alone() -> None:
    """The streams have windows of different shapes and different speakers."""
    parts = Parts.random(flow_config())
    stops = [(12, 24, 36), (12, 24), (24, 36, 39), (6, 12, 18)]
    utterances = [chunks_of(some_tokens(ends[-1], seed), ends) for seed, ends in enumerate(stops)]
    alone = [spoken(parts.engine(), [chunks], [seed]) for seed, chunks in enumerate(utterances)]
    together = spoken(parts.engine(), utterances, range(len(stops)))
    for mel, [expected], ends in zip(together, alone, stops, strict=True):
        assert mel.shape == (BANDS, RATIO * ends[-1])
        assert off(mel.numpy(), expected.numpy()) <= MEL
