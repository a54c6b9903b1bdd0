"""Decoder stage: the tokens of chunks become the frames of a waveform stage.

`tests/families/test_codec_contract.py` tests the audio of every codec.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from testkit.models.random_weights import fill
from testkit.utterances import Tokens, off
from token2wav.errors import StreamClosedError
from token2wav.layers.combine import placed
from token2wav.layers.streaming import (
    OFFLINE,
    StreamConvTranspose,
    StreamStep,
    WaveformNetwork,
    centred_conv,
)
from token2wav.stages.decoder import TokenDecoder
from token2wav.stages.recompute import RecomputeVocoder
from token2wav.stages.stage import CacheUsage, TokenChunk
from token2wav.stages.waveform import WaveformStage

WIDTH, CODES, LATENTS, SAMPLES, COUNT = 4, 20, 3, 6, 30
AHEAD = 2  # frames of look-ahead
ROUNDING = 1e-5


class Decoder(WaveformNetwork):
    """Small decoder of frames with a number of codes, or of latents."""

    frame_samples = SAMPLES

    def __init__(self, codebooks: int) -> None:
        super().__init__()
        self.input_channels = codebooks or LATENTS
        self.input_dtype = torch.int32 if codebooks else torch.float32
        self.tables = nn.ModuleList(nn.Embedding(CODES, WIDTH) for _ in range(codebooks))
        self.around = centred_conv(WIDTH if codebooks else LATENTS, WIDTH, 2 * AHEAD + 1)
        self.up = StreamConvTranspose(WIDTH, 1, 2 * SAMPLES, SAMPLES, cut="end")
        self.output = placed((self.around, self.up))

    def forward(self, frames: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        if self.tables:
            embedded = [table(frames[:, index]) for index, table in enumerate(self.tables)]
            frames = torch.stack(embedded).sum(0).transpose(1, 2)
        return self.up(self.around(frames, step).tanh(), step)


def codes(*shape: int) -> Tokens:
    return np.random.default_rng(0).integers(0, CODES, shape).astype(np.int32)


def latents() -> Tokens:
    return np.random.default_rng(0).standard_normal((COUNT, LATENTS)).astype(np.float32)


# Codebooks of the network, and the tokens of an utterance.
KINDS: dict[str, tuple[int, Callable[[], Tokens]]] = {
    "a code": (1, lambda: codes(COUNT)),
    "two codes": (2, lambda: codes(COUNT, 2)),
    "a latent": (0, latents),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def a_network(kind: str) -> Decoder:
    network = fill(Decoder(KINDS[kind][0]))
    network.freeze()
    return network


def chunks_of(tokens: Tokens, stops: tuple[int, ...], known: int) -> list[TokenChunk]:
    """Cuts tokens into chunks, each of which brings `known` tokens of the next chunk."""
    return [
        TokenChunk(tokens[start : stop + known], start, stop, last=stop == len(tokens))
        for start, stop in zip((0, *stops), (*stops, len(tokens)), strict=False)
    ]


@pytest.mark.parametrize("known", [0, 2])
@pytest.mark.parametrize("make", [WaveformStage, RecomputeVocoder])
def test_chunks_of_several_streams_give_the_whole(
    kind: str, make: type[WaveformStage | RecomputeVocoder], known: int
) -> None:
    stage, tokens = TokenDecoder(make(a_network(kind))), KINDS[kind][1]()
    whole = stage.whole(tokens)
    assert whole.shape == (SAMPLES * COUNT,)
    streams = [chunks_of(tokens, stops, known) for stops in ((1, 2, 9), (10, 11, 12))]
    handles, audio = [stage.open() for _ in streams], [list[torch.Tensor]() for _ in streams]
    assert stage.open_streams == 2
    for batch in zip(*streams, strict=True):
        pieces = stage.advance(list(zip(handles, batch, strict=True)))
        for heard, piece in zip(audio, pieces, strict=True):
            heard.append(piece)
    for handle, heard in zip(handles, audio, strict=True):
        assert off(torch.cat(heard), whole) <= ROUNDING
        stage.close(handle)
    assert stage.open_streams == 0


@pytest.mark.parametrize("known", [0, 1, 3])
def test_known_tokens_of_the_next_chunk_are_read_and_not_spoken(kind: str, known: int) -> None:
    """A stage that withholds a frame less than its look-ahead guesses a frame, or knows it."""
    tokens, network = KINDS[kind][1](), a_network(kind)
    stage = TokenDecoder(WaveformStage(network, lookahead_frames=AHEAD - 1))
    handle, whole = stage.open(), stage.whole(tokens)
    first, second = chunks_of(tokens, (10,), known)
    [audio], [rest] = (stage.advance([(handle, chunk)]) for chunk in (first, second))
    stage.close(handle)
    assert len(audio) == (10 - (AHEAD - 1)) * SAMPLES
    assert off(rest, whole[len(audio) :]) <= ROUNDING
    assert (off(audio, whole[: len(audio)]) <= ROUNDING) == (known > 0)


def test_the_stage_below_has_the_memory(kind: str) -> None:
    frames = WaveformStage(a_network(kind))
    stage, tokens = TokenDecoder(frames), KINDS[kind][1]()
    assert stage.withheld_samples == frames.withheld_samples == AHEAD * SAMPLES
    stage.limit_chunks(3)
    assert stage.usage() == CacheUsage()
    handle = stage.open()
    assert frames.open_streams == 1
    for _ in range(2):
        stage.close(handle)
        assert (stage.open_streams, frames.store.used) == (0, 0)
    with pytest.raises(StreamClosedError, match=f"stream {handle}: it has ended"):
        stage.advance([(handle, chunk) for chunk in chunks_of(tokens, (), 0)])
