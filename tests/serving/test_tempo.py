"""Speeds of utterances: the mel between flow and vocoder, interpolated in streams and batches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import interpolate, pad

from testkit.batches import WHOLE_BLOCKS
from testkit.models.folders import CPU
from testkit.models.golden import snr_db
from testkit.models.tiny_model import ODE_STEPS, TINY
from testkit.utterances import a_voice, joined, some_tokens
from token2wav import AudioChunk, StreamConfig, Token2Wav, UtteranceOptions
from token2wav.serving.hops import HopSchedule
from token2wav.serving.tempo import Tempo, exact_speed

SPEEDS = [0.5, 0.7, 0.99, 1.1, 4 / 3, 1.9, 2]
INTERPOLATED = 1e-5  # of float32
WHOLE_DB = 40  # end to end, because F0 turns rounding of the mel into phase


def stretched(mel: torch.Tensor, speed: float) -> torch.Tensor:
    """Returns the mel (bands, n) of a whole utterance at a speed, by torch.

    The last frame is repeated: torch copies a mel whose number of frames stays the same, and may
    lack the last frame, because the factor 1 / speed is rounded.
    """
    repeated = pad(mel[None].double(), (0, 200), mode="replicate")
    result = interpolate(repeated, scale_factor=1 / speed, mode="linear")[0].float()
    return result[:, : int(mel.shape[1] / exact_speed(speed))]


@pytest.mark.parametrize("speed", SPEEDS)
@settings(max_examples=40)
@given(st.integers(1, 150), st.lists(st.integers(0, 150), max_size=12), st.booleans())
def test_any_division_of_a_mel_gives_the_interpolation_of_the_whole(
    speed: float, frames: int, cuts: list[int], ends_empty: bool
) -> None:
    mel = torch.randn(3, frames, generator=torch.Generator().manual_seed(frames))
    tempo = Tempo(exact_speed(speed))
    bounds = sorted(min(cut, frames) for cut in [*cuts, 0, *[frames] * (1 + ends_empty)])
    pieces = [
        tempo.advance(mel[:, begin:end], last=index == len(bounds) - 2)
        for index, (begin, end) in enumerate(pairwise(bounds))
    ]
    result, expected = torch.cat(pieces, dim=1), stretched(mel, speed)
    torch.testing.assert_close(result, expected, rtol=0, atol=INTERPOLATED)


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_chunk_holds_back_no_more_than_needs_a_later_frame(speed: float) -> None:
    tempo, made = Tempo(exact_speed(speed)), 0
    for received in range(1, 40):
        made += tempo.advance(torch.zeros(1, 1), last=False).shape[1]
        assert received / speed - made <= 1 + 1 / speed


def test_the_vocoder_gets_the_interpolated_mel() -> None:
    """`tests/serving/door/test_models.py` compares streams of all families with `synthesize`."""
    stream = StreamConfig(steps=(ODE_STEPS,), first_tokens=WHOLE_BLOCKS.first_tokens)
    model, voice, tokens = (
        Token2Wav.load(TINY, stream=stream, runtime=CPU),
        a_voice(30),
        some_tokens(90),
    )
    for speed in (0.7, 1.9):
        audio = model.synthesize(tokens, voice, UtteranceOptions(speed=speed))
        assert len(audio) == int(2 * len(tokens) / speed) * 480
        mel = stretched(torch.from_numpy(model.mel(tokens, voice)), speed)
        assert snr_db(audio, model.vocode(mel.numpy())) > WHOLE_DB


@pytest.mark.parametrize("speed", [0.5, 2])
def test_tokens_one_by_one_speak_early(speed: float) -> None:
    """The first chunk has the audio of half of its usual tokens, beside withheld samples."""
    model = Token2Wav.load(TINY, runtime=CPU)  # a new model, which has measured no long waits
    tokens, chunks, first = some_tokens(60), list[AudioChunk](), 0
    with model.stream(a_voice(30), UtteranceOptions(speed=speed)) as stream:
        for count, token in enumerate(tokens, 1):
            chunks += stream.push([token])
            first = first or (count if chunks else 0)
        chunks += stream.finish()
    withheld = model.pipeline.stages["vocoder"].withheld_samples
    stream_config, lookahead = StreamConfig(), StreamConfig().provisional_lookahead_tokens
    schedule = HopSchedule.of(stream_config, model.config, withheld * speed)
    assert first == schedule.first_tokens + lookahead
    assert len(joined(chunks)) == 480 * 2 * len(tokens) / speed
    spoken = {token for chunk in chunks for token in _tokens_of(chunk)}
    assert spoken == set(range(len(tokens)))
    assert len(chunks[0].audio) >= 960 * stream_config.first_tokens / 2 / speed - 480


def _tokens_of(chunk: AudioChunk) -> range:
    return range(chunk.first_token, chunk.first_token + chunk.token_count)
