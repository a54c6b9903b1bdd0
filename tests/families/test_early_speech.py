"""Provisional first audio of every family with a caching flow: provisional chunks leave nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support import chatterbox_model, cosyvoice2_model, stepaudio2_model
from tests.support.family_golden import FamilyGolden
from tests.support.utterances import a_voice, off, some_tokens
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.serving.chunking import Chunker, HopSchedule

MEL = 2e-5  # as for these families' streams in whole blocks
FAMILIES = {
    "cosyvoice2": cosyvoice2_model,
    "stepaudio2": stepaudio2_model,
    "chatterbox": chatterbox_model,
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Token2Wav:
    golden, folder = FamilyGolden(request.param, "tiny"), tmp_path_factory.mktemp("model")
    made: Path = FAMILIES[request.param].write_model(folder, golden)
    return Token2Wav.load(made, runtime=RuntimeConfig(device="cpu", cache_mib=400))


@pytest.mark.parametrize("prompt", [0, 30, 75])
def test_from_the_first_whole_block_on_the_mel_is_that_of_the_whole(
    model: Token2Wav, prompt: int
) -> None:
    voice, tokens, flow = a_voice(prompt), some_tokens(120), model.pipeline.flow
    schedule = HopSchedule.of(StreamConfig(), model.config)
    assert schedule.first_tokens == 8
    chunker, handle, mels, provisional = (
        Chunker(voice.prompt_tokens, model.config, schedule),
        flow.open(voice),
        [],
        0,
    )
    for portion in np.split(tokens, [10, 11, 40]):
        chunker.push(portion, end=chunker.new_tokens >= 40)
        while (chunk := chunker.next_chunk) is not None:
            [mel] = flow.advance([(handle, chunk)])
            mels.append(mel.numpy()[:, 2 * chunk.skip :])
            provisional = chunk.stop - prompt if chunk.provisional else provisional
            chunker.computed()
    flow.close(handle)
    assert provisional == 8
    spoken, whole = np.concatenate(mels, axis=1), model.mel(tokens, voice)
    exact = slice(2 * provisional, spoken.shape[1])
    assert spoken.shape == whole.shape
    assert off(spoken[:, exact], whole[:, exact]) <= MEL
    assert off(spoken[:, : exact.start], whole[:, : exact.start]) > MEL
