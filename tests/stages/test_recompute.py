"""Recompute stages: every chunk is computed from the whole history of its stream.

`tests/families/cosyvoice3/test_stream_parity.py` compares streams of these stages with the whole
and with the public code. Other tests compare other stages with these.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from testkit.utterances import Tokens, a_voice, off, some_tokens
from tests.stages.rig import AUDIO, MEL, Parts
from token2wav.errors import BackendError, StreamClosedError
from token2wav.stages.recompute import RecomputeFlow, RecomputeVocoder
from token2wav.stages.stage import FrameChunk, TokenChunk

BLOCK, COUNT, RATIO = 25, 60, 2
VOICE = a_voice(0)  # without a prompt, so that positions count from the first token
TOKENS = some_tokens(COUNT)


@pytest.fixture
def flow(parts: Parts) -> RecomputeFlow:
    return parts.recompute()


def chunk(parts: Parts, start: int, stop: int, *, provisional: bool = False) -> TokenChunk:
    """Returns a chunk of the utterance with its look-ahead."""
    tokens = TOKENS[start : stop + parts.config.lookahead_tokens]
    return TokenChunk(tokens, start, stop, last=stop == COUNT, provisional=provisional)


def test_a_batch_equals_each_stream_alone(parts: Parts, flow: RecomputeFlow) -> None:
    alone = [flow.advance([(flow.open(VOICE), chunk(parts, 0, stop))])[0] for stop in (25, 50)]
    handles = [flow.open(VOICE) for _ in alone]
    chunks = [chunk(parts, 0, stop) for stop in (25, 50)]
    together = flow.advance(list(zip(handles, chunks, strict=True)))
    for mel, expected in zip(together, alone, strict=True):
        assert off(mel, expected) <= MEL
    assert together[0].shape == (parts.config.mel_bands, RATIO * BLOCK)


def test_a_chunk_that_does_not_follow_is_refused(parts: Parts, flow: RecomputeFlow) -> None:
    """The first block of the prompt is computed when the stream opens."""
    handle = flow.open(a_voice(30))
    with pytest.raises(BackendError, match=r"^chunk starts at token 50, but 25 were computed$"):
        flow.advance([(handle, chunk(parts, 50, 60))])


def test_a_provisional_chunk_leaves_no_trace(parts: Parts, flow: RecomputeFlow) -> None:
    handle = flow.open(VOICE)
    [early] = flow.advance([(handle, chunk(parts, 0, 10, provisional=True))])
    assert early.shape[1] == RATIO * 10
    mel = torch.cat(
        [
            flow.advance([(handle, chunk(parts, start, stop))])[0]
            for start, stop in ((0, 25), (25, 60))
        ],
        dim=1,
    )
    assert off(mel, flow.whole(TOKENS, VOICE, streaming=True)) <= MEL


def test_a_stream_resumes_after_any_tokens(parts: Parts, flow: RecomputeFlow) -> None:
    """A cached stream that runs out of pages continues so."""
    handle = flow.resume(VOICE, TOKENS[:25])
    [mel] = flow.advance([(handle, chunk(parts, 25, 60))])
    whole = flow.whole(TOKENS, VOICE, streaming=True)
    assert off(mel, whole[:, RATIO * 25 :]) <= MEL


def test_the_last_chunk_under_full_attention(parts: Parts) -> None:
    flow = a_flow(parts, full_tail=True)
    handle = flow.open(VOICE)
    [first] = flow.advance([(handle, chunk(parts, 0, 25))])
    [last] = flow.advance([(handle, chunk(parts, 25, 60))])
    blocks, full = (flow.whole(TOKENS, VOICE, streaming=streaming) for streaming in (True, False))
    assert off(first, blocks[:, : RATIO * 25]) <= MEL
    assert off(last, full[:, RATIO * 25 :]) <= MEL
    assert off(last, blocks[:, RATIO * 25 :]) > 0.01


def test_every_chunk_under_full_attention(parts: Parts) -> None:
    """A chunk sees all tokens that have arrived, as if the utterance ended after them."""
    flow = a_flow(parts, windows=True)
    handle = flow.open(VOICE)
    for start, stop in ((0, 25), (25, 50), (50, 60)):
        [mel] = flow.advance([(handle, chunk(parts, start, stop))])
        arrived: Tokens = TOKENS[: stop + parts.config.lookahead_tokens]
        whole = flow.whole(arrived, VOICE, streaming=False)
        assert off(mel, whole[:, RATIO * start : RATIO * stop]) <= MEL


def a_flow(parts: Parts, **options: bool) -> RecomputeFlow:
    solvers = {parts.config.ode_steps: parts.solver}
    return RecomputeFlow(parts.config, parts.flow, parts.flow_noise, solvers, **options)


@pytest.mark.parametrize("sizes", [[1] * 12, [20, 0, 33, 7], [5, 55]], ids=str)
def test_audio_of_any_pieces_is_that_of_the_whole(parts: Parts, sizes: list[int]) -> None:
    vocoder, mel = RecomputeVocoder(parts.hift, parts.source_noise), torch.randn(80, sum(sizes))
    handle, audio, frames = vocoder.open(), list[torch.Tensor](), 0
    for number, piece in enumerate(mel.split(sizes, dim=1), 1):
        last = number == len(sizes)
        audio += vocoder.advance([(handle, FrameChunk(piece, last))])
        frames += piece.shape[1]
        held = 0 if last else parts.hift.output_delay
        assert sum(map(len, audio)) == max(0, 480 * frames - held)
    assert off(torch.cat(audio), vocoder.whole(mel)) <= AUDIO


def test_a_closed_stream_leaves_nothing(parts: Parts, flow: RecomputeFlow) -> None:
    vocoder = RecomputeVocoder(parts.hift, parts.source_noise)
    stages: list[tuple[RecomputeFlow | RecomputeVocoder, Callable[[int], object]]] = [
        (flow, lambda handle: flow.advance([(handle, chunk(parts, 0, 25))])),
        (vocoder, lambda handle: vocoder.advance([(handle, FrameChunk(torch.zeros(80, 9), True))])),
    ]
    for stage, advance in stages:
        handle = stage.open(VOICE)
        assert stage.open_streams == 1
        stage.close(handle)
        stage.close(handle)
        assert stage.open_streams == 0
        with pytest.raises(StreamClosedError, match=f"^stream {handle}: it has ended$"):
            advance(handle)
