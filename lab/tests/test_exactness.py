"""Windows beside streams: what the benchmark calls exact is exact, and a short window is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.exactness import Windows, clicks, error_db, frames_to_first_audio, stream
from testkit.models.codec_models import CODECS
from testkit.models.published_codecs import SIXTEENTH
from token2wav import RuntimeConfig, StreamConfig, Token2Wav

PATCH, FRAMES = 4, 48
REACH = 19  # latents that the decoder of VoxCPM2 reads before a sample
EXACT_DB, WRONG_DB = -100.0, -40.0


@pytest.fixture(scope="module")
def voxcpm(tmp_path_factory: pytest.TempPathFactory) -> Token2Wav:
    folder = CODECS["voxcpm"].write(tmp_path_factory.mktemp("voxcpm"), SIXTEENTH["voxcpm"])
    return Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu"))


def test_only_windows_with_the_whole_reach_are_exact(voxcpm: Token2Wav) -> None:
    latents = np.random.default_rng(0).standard_normal((FRAMES, 64), np.float32)
    whole = voxcpm.synthesize(latents)
    seams = np.arange(PATCH, FRAMES, PATCH) * (len(whole) // FRAMES)
    streamed, chunks = stream(voxcpm, latents)
    assert error_db(streamed, whole, len(whole)) < EXACT_DB
    assert clicks(streamed, whole, chunks).max() < 1e-4
    for before, exact in ((REACH, True), (3 * PATCH, False), (0, False)):
        audio = Windows("", PATCH, before).decode(voxcpm, latents)
        error, click = error_db(audio, whole, len(whole)), clicks(audio, whole, seams).max()
        assert (error < EXACT_DB and click < 1e-4) if exact else (error > WRONG_DB and click > 1e-2)


def test_a_stream_needs_the_reach_after_a_sample_before_its_first_audio(tmp_path: Path) -> None:
    folder = CODECS["higgs"].write(tmp_path, SIXTEENTH["higgs"])
    codes = np.random.default_rng(0).integers(0, 1024, (64, 8)).astype(np.int32)
    model = Token2Wav.load(
        folder, stream=StreamConfig(lookahead_frames=0), runtime=RuntimeConfig(device="cpu")
    )
    whole = model.synthesize(codes)
    assert frames_to_first_audio(model, codes) == 11  # a frame, and 394 ms of 40 ms
    assert error_db(stream(model, codes)[0], whole, len(whole)) < EXACT_DB
    for after, exact in ((0, False), (10, True)):
        audio = Windows("", 16, 10, after).decode(model, codes)
        error = error_db(audio, whole, len(whole))
        assert error < EXACT_DB if exact else error > WRONG_DB
