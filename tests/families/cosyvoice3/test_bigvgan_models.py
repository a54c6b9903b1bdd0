"""Model folders that name a BigVGAN. `tests/families/test_streams.py` tests their streams."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from testkit.models.bigvgan import GOLDEN, changed
from testkit.models.bigvgan_model import (
    SAMPLES_PER_TOKEN,
    VOCODER,
    write_folder,
    write_model,
)
from testkit.models.yaml_edits import edit_text
from token2wav import CheckpointError, Token2Wav
from token2wav.assembly import check_folder
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.published.artifacts import fingerprint

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


def test_a_public_folder_beside_the_yaml(tmp_path: Path) -> None:
    """The golden files, with weight norm and public names, in the model folder itself."""
    rates = {"num_mels": 100, "hop_size": 256, "sampling_rate": 24_000}
    vocoder = changed(upsample_rates=(16, 16), upsample_kernel_sizes=(32, 32), **rates)
    folder = write_folder(tmp_path / "model", vocoder, 2)
    shutil.rmtree(folder / "bigvgan")
    edit_text(folder / "cosyvoice3.yaml", ("    folder: bigvgan\n", ""))
    for name in ("config.json", "generator.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    model = Token2Wav.load(folder)
    assert model.config.token_frame_rate == 46.875
    mel = np.random.default_rng(0).standard_normal((100, 30)).astype(np.float32)
    assert model.vocode(mel).shape == (30 * 256,)


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
