"""Model folders that name a BigVGAN: loaded, checked against their flow, streamed, exported; or
refused, with why.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from testkit.batches import WHOLE_BLOCKS
from testkit.models.bigvgan import GOLDEN, changed
from testkit.models.bigvgan_model import (
    SAMPLES_PER_TOKEN,
    VOCODER,
    a_voice,
    write_folder,
    write_model,
)
from testkit.models.tiny_model import one_line
from testkit.models.yaml_edits import edit_yaml
from testkit.recomputing import recomputing
from testkit.tables import table
from testkit.utterances import chunks_of, joined, off
from token2wav import CheckpointError, ConfigError, RuntimeConfig, Token2Wav
from token2wav.assembly import check_folder
from token2wav.exported.artifacts import EngineFolder, fingerprint
from token2wav.families.cosyvoice3.config import CosyVoice3Config

AUDIO = 1e-4
TOKENS = np.random.default_rng(0).integers(0, 6561, 130)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "bigvgan16k")


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """Copy of the model folder, which the test may change."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def test_rates_follow_from_the_folder(folder: Path) -> None:
    config = CosyVoice3Config.read(folder)
    assert config.vocoder == VOCODER
    assert (config.sample_rate, config.samples_per_token) == (16_000, SAMPLES_PER_TOKEN)
    assert config.token_frame_rate == pytest.approx(100 / 3)
    check_folder(folder)


@pytest.mark.parametrize("incremental", [True, False])
def test_a_stream_equals_the_whole(folder: Path, incremental: bool) -> None:
    model, voice = (
        Token2Wav.load(folder, stream=WHOLE_BLOCKS) if incremental else recomputing(folder),
        a_voice(),
    )
    whole = model.vocode(model.mel(TOKENS, voice))
    assert whole.shape == (SAMPLES_PER_TOKEN * len(TOKENS),)
    assert 0.01 < whole.std() < 0.5
    chunks = chunks_of(model, np.array_split(TOKENS, 9), voice)
    assert len(chunks) > 2
    assert {(chunk.sample_rate, chunk.samples_per_token) for chunk in chunks} == {
        (16_000, SAMPLES_PER_TOKEN)
    }
    assert off(joined(chunks), whole) <= AUDIO


def test_a_public_folder_beside_the_yaml(tmp_path: Path) -> None:
    """The golden files, with weight norm and public names, in the model folder itself."""
    rates = {"num_mels": 100, "hop_size": 256, "sampling_rate": 24_000}
    vocoder = changed(upsample_rates=(16, 16), upsample_kernel_sizes=(32, 32), **rates)
    folder = write_folder(tmp_path / "model", vocoder, 2)
    shutil.rmtree(folder / "bigvgan")
    edit_yaml(folder, "    folder: bigvgan\n", "")
    for name in ("config.json", "generator.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    model = Token2Wav.load(folder)
    assert model.config.token_frame_rate == 46.875
    mel = np.random.default_rng(0).standard_normal((100, 30)).astype(np.float32)
    assert model.vocode(mel).shape == (30 * 256,)


@pytest.mark.slow
def test_its_graphs_serve(folder: Path, tmp_path: Path) -> None:
    """Maker accepts a graph only if it equals torch. Then streams run on the graphs."""
    # The import is here, because a GPU machine without the package onnx collects this folder too.
    from token2wav_export.making import Maker

    maker = Maker(folder, EngineFolder(tmp_path), ["pytest"])
    maker.onnx("vocoder", "float32")
    maker.onnx("step", "float32")
    model, voice = Token2Wav.load(folder), a_voice()
    other = Token2Wav.load(folder, runtime=RuntimeConfig(backend="onnx", engines=str(tmp_path)))
    assert other.backend.name == "onnx"
    assert off(other.synthesize(TOKENS, voice), model.synthesize(TOKENS, voice)) <= AUDIO


def test_graphs_are_of_one_generator(copied: Path) -> None:
    before, flow = fingerprint(copied, "vocoder"), fingerprint(copied, "flow")
    path = copied / "bigvgan" / "generator.safetensors"
    path.rename(path.with_suffix(".old"))
    with pytest.raises(CheckpointError, match=r"bigvgan: contains none of generator\.safetensors"):
        fingerprint(copied, "vocoder")
    content = bytearray(path.with_suffix(".old").read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert fingerprint(copied, "vocoder") != before
    assert fingerprint(copied, "flow") == flow


# pattern of the replaced text, new text, message
WRONG = table(
    r"""
type: bigvgan | type: vocos | vocoder.type: 'vocos' is not bigvgan; for HiFT, remove
"    type: bigvgan\n" | "" | vocoder.type: missing
type: bigvgan | type: bigvgan\n    path: x | vocoder: unknown key 'path'; expected type or folder
vocoder:\n    type: bigvgan\n    folder: | vocoder: | vocoder: expected a mapping
folder: bigvgan | folder: ../bigvgan | '../bigvgan' is not a folder below the model
folder: bigvgan | folder: /bigvgan | '/bigvgan' is not a folder below the model
folder: bigvgan | folder: other | other: not a BigVGAN folder, config.json cannot be read
sample_rate: 16000 | sample_rate: 24000 | BigVGAN: sampling_rate is 16000 instead of 24000
(?m)^token_mel_ratio: 3 | token_mel_ratio: 1 | BigVGAN: hop_size is 160 instead of 480
(?m)^sample_rate: 16000\n | "" | key 'sample_rate' is missing
token_frame_rate: .* | token_frame_rate: 33 | sample_rate: 16000 Hz gives 161.62 samples to each
token_frame_rate: .* | token_frame_rate: 0 | flow.input_frame_rate: 0.0 is not between 0.01 and 1000
"""
)


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_a_vocoder_that_does_not_fit_is_refused_early(
    copied: Path, old: str, new: str, message: str
) -> None:
    edit_yaml(copied, old, new)
    for path in (copied / "flow.safetensors", copied / "bigvgan" / "generator.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError) as caught:
        Token2Wav.load(copied)
    assert message in one_line(caught.value)


def test_other_bands_than_the_flow_makes(copied: Path) -> None:
    path = copied / "bigvgan" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_mels": 80}))
    with pytest.raises(ConfigError, match="BigVGAN: num_mels is 80 instead of 20; use a BigVGAN"):
        Token2Wav.load(copied)


def test_missing_weights(copied: Path) -> None:
    (copied / "bigvgan" / "generator.safetensors").unlink()
    for load in (Token2Wav.load, check_folder):
        with pytest.raises(
            CheckpointError, match=r"none of generator\.safetensors, bigvgan_generator\.pt"
        ):
            load(copied)
