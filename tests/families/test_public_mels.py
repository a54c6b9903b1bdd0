"""Mels of the families with a caching flow against their public code: under full attention, under
the block mask, and in chunks. `cosyvoice3/test_flow_parity.py` has CosyVoice3.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.models.chatterbox_model import write_conditionals
from testkit.models.folders import CPU, golden_of, write_folder
from testkit.utterances import off, streamed_mels
from token2wav import StreamConfig, Token2Wav, Voice

MEL = 2e-5  # tolerance between float32 results with values up to 7
ALL = StreamConfig(left_blocks=-1)  # the golden mels of Step-Audio2 have no window
# Golden mels of each family: full attention, block mask, and the start of an unfinished utterance.
MELS = {
    "cosyvoice2": ("mel_full", "mel_streaming", "mel_chunk"),
    "moss_speech": ("mel_full", "mel_streaming", "mel_chunk"),
    "stepaudio2": ("mel_full", "mel_streaming"),
    "chatterbox": ("mel_full",),
    "turbo": ("mel_meanflow",),
}


@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize("family", MELS)
def test_public_mel(family: str, size: str, tmp_path: Path) -> None:
    """The mask of Step-Audio2 counts its blocks from the end of the prompt."""
    golden = golden_of(family, size)
    model = Token2Wav.load(write_folder(family, tmp_path, size), stream=ALL, runtime=CPU)
    full, *streaming = (golden[name].numpy() for name in MELS[family])
    voice, tokens = golden.voice, golden["token"].numpy()
    mel, masked = (model.mel(tokens, voice, streaming=streams) for streams in (False, True))
    assert off(mel, full) <= MEL
    [streamed] = streamed_mels(model, (tokens, voice))
    for expected in streaming:
        for ours in (masked, streamed):
            assert off(ours[:, : expected.shape[1]], expected) <= MEL
    assert off(mel, masked) > 0.01


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_voices_of_chatterbox(size: str, tmp_path: Path) -> None:
    golden = golden_of("chatterbox", size)
    read = Voice.load(write_conditionals(tmp_path / "conds.pt", golden))
    for name, value in vars(golden.voice).items():
        assert off(getattr(read, name), value) == 0, name
