"""CosyVoice2 and MOSS-Speech in the library: the public mel, planned memory and early audio.

tests/families/test_streams.py tests its streams.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families.cosyvoice2.conftest import CPU
from tests.support.caching_families import WRITERS
from tests.support.cosyvoice2_model import golden_voice
from tests.support.family_golden import FamilyGolden
from tests.support.utterances import a_voice, joined, off, some_tokens, streamed_mels
from token2wav import StreamConfig, Token2Wav
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav_server.plan_memory import stream_needs

MEL = 2e-5  # tolerance between float32 results with values up to 5
AUDIO = 1e-4


@pytest.mark.parametrize("family", ["cosyvoice2", "moss_speech"])
@pytest.mark.parametrize("size", ["tiny", "small"])
def test_public_mel(family: str, size: str, tmp_path: Path) -> None:
    golden = FamilyGolden(family, size)
    model = Token2Wav.load(WRITERS[family](tmp_path, golden), runtime=CPU)
    tokens, voice = golden["token"].numpy(), golden_voice(golden)
    assert off(model.mel(tokens, voice), golden["mel_streaming"].numpy()) <= MEL
    assert off(model.mel(tokens, voice, streaming=False), golden["mel_full"].numpy()) <= MEL
    [mel] = streamed_mels(model, (tokens, voice))
    chunk = golden["mel_chunk"].numpy()
    assert off(mel, golden["mel_streaming"].numpy()) <= MEL
    assert off(mel[:, : chunk.shape[1]], chunk) <= MEL


def test_planned_memory_equals_the_memory_of_a_stream(folder: Path) -> None:
    voice, model = a_voice(60), Token2Wav.load(folder, runtime=CPU)
    flow, most = model.pipeline.flow, 0
    handle = flow.open(voice)
    schedule = HopSchedule.of(StreamConfig(), model.config)
    chunker = Chunker(voice.prompt_tokens, model.config, schedule)
    chunker.push(some_tokens(130), end=True)
    while (chunk := chunker.next_chunk) is not None:
        flow.advance([(handle, chunk)])
        chunker.finish_chunk()
        most = max(most, flow.usage().used - flow.usage().shared)
    needs = stream_needs(model.config, StreamConfig(), "float32", 60, 130)
    assert (needs.page_bytes, needs.prompt_pages) == (flow.usage().page_bytes, flow.usage().shared)
    assert abs(needs.pages - most) <= 2  # the formula assumes other hops
    flow.close(handle)


def test_early_audio(folder: Path, model: Token2Wav) -> None:
    extrapolating = Token2Wav.load(folder, stream=StreamConfig(lookahead_frames=8), runtime=CPU)
    voice, tokens = a_voice(0), some_tokens(60)
    with extrapolating.stream(voice) as stream:
        [first] = stream.push(tokens)
        audio = joined([first, *stream.finish()])
    assert len(first.audio) == (50 - 8) * 480
    whole = model.synthesize(tokens, voice)
    exact = (50 - 21) * 480
    assert off(audio[:exact], whole[:exact]) <= AUDIO
    assert off(audio[len(first.audio) :], whole[len(first.audio) :]) <= AUDIO
