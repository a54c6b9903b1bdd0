"""The codec of Pocket TTS in the library: the public audio, streams and batches of latents, and
latents and folders that are refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from tests.support.batches import spoken_together
from tests.support.family_golden import FamilyGolden
from tests.support.pocket_model import document, write_model
from tests.support.utterances import chunks_of, joined, off, portions
from token2wav import ConfigError, InputError, RuntimeConfig, Token2Wav
from token2wav.families import read_config
from token2wav.voice import voice_for

# Of the spread of the audio. Sums are in another order than in the public code.
PARITY = 1e-5
CPU = RuntimeConfig(device="cpu")


@pytest.fixture(scope="module", params=["tiny", "small"])
def golden(request: pytest.FixtureRequest) -> FamilyGolden:
    return FamilyGolden("pocket_tts", request.param)


@pytest.fixture(scope="module")
def model(golden: FamilyGolden, tmp_path_factory: pytest.TempPathFactory) -> Token2Wav:
    return Token2Wav.load(write_model(tmp_path_factory.mktemp("pocket"), golden), runtime=CPU)


def latents(model: Token2Wav, count: int) -> NDArray[np.float32]:
    drawn = np.random.default_rng(count).normal(size=(count, *model.config.token_shape))
    return drawn.astype(np.float32)


def test_the_public_audio(golden: FamilyGolden, model: Token2Wav) -> None:
    expected = golden["audio"].numpy()
    audio = model.synthesize(golden["latents"].numpy())
    assert audio.shape == expected.shape
    assert off(audio, expected) <= PARITY * expected.std()


@pytest.mark.parametrize("sizes", [[1], [2, 3, 1], [7, 30], [40]], ids=str)
def test_a_stream_is_the_whole_in_any_portions(model: Token2Wav, sizes: list[int]) -> None:
    given = latents(model, 40)
    [decoder] = model.pipeline.stages.values()
    whole = decoder.whole(given).numpy()  # type: ignore[attr-defined]
    chunks = chunks_of(model, portions(given, sizes))
    assert len(chunks) > 1
    assert off(joined(chunks), whole) <= PARITY * whole.std()


def test_a_batch_equals_each_stream(model: Token2Wav) -> None:
    utterances = [latents(model, count) for count in (40, 9, 22)]
    nobody = voice_for(model.config, None)
    together = spoken_together(model.pipeline, [(nobody, each, 0) for each in utterances])
    for given, audio in zip(utterances, together, strict=True):
        alone = model.synthesize(given)
        assert off(audio, alone) <= PARITY * alone.std()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.zeros(5), r"latents: shape \(5,\), expected \(latents, "),
        (np.zeros((2, 3)), r"latents: shape \(2, 3\), expected \(latents, "),
        ([[0.0], [0.0, 1.0]], "latents: rows of different lengths"),
        (np.full((2, 64), np.nan), "latents: holds NaN"),
        (np.full((2, 64), -2e4), "latents: -20000 at index 0, 0 is outside -10000 to 10000"),
        ([["a"]], "latents: not an array of numbers"),
        (np.zeros((0, 64)), "latents: .*at least 1"),
        ([], "latents: .*at least 1"),
    ],
)
def test_latents_that_are_refused(wrong: ArrayLike, message: str, model: Token2Wav) -> None:
    if isinstance(wrong, np.ndarray) and wrong.ndim == 2:
        wrong = wrong[:, : model.config.token_shape[0]]
    with model.stream() as stream:
        stream.push(latents(model, 1))
        with pytest.raises(InputError, match=message):
            model.synthesize(wrong)
        stream.finish(latents(model, 1))
    assert model.pipeline.open_streams == 0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("latent_dim", 0, "latent_dim: 0 is not between"),
        ("latent_stride", 10**9, "latent_stride: 1000000000 is not between"),
        ("hidden_act", "relu", "hidden_act"),
        ("upsampling_ratios", [], "empty; at least 1"),
    ],
)
def test_values_that_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    content = {**document(FamilyGolden("pocket_tts", "tiny")), key: value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        read_config(tmp_path)
