"""BigVGAN folders: every form of a good one gives the same module. Model folders that name one.

`tests/families/test_streams.py` tests their streams.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from testkit.models.bigvgan import GOLDEN, changed, load_bigvgan, random_bigvgan
from testkit.models.bigvgan_model import write_folder, write_model
from testkit.models.yaml_edits import edit_text
from token2wav import CheckpointError, Token2Wav
from token2wav.families.cosyvoice3.bigvgan import read_bigvgan
from token2wav.networks.bigvgan import BigVGAN
from token2wav.published.artifacts import fingerprint

Weights = dict[str, Any]
# One layer of each kind.
LEAST = changed(
    upsample_rates=(8,),
    upsample_kernel_sizes=(16,),
    resblock_kernel_sizes=(3,),
    resblock_dilation_sizes=((2,),),
)
# Keys that the loader ignores.
TRAINING = {"batch_size": 32, "n_fft": 1024, "fmax": None, "discriminator": "mrd"}


def normed(bigvgan: BigVGAN) -> Weights:
    """Returns a state dict in the published form: weight norm with directions of other lengths."""
    weights: Weights = {}
    for name, value in bigvgan.state_dict().items():
        if name.endswith(".weight"):
            weights[f"{name}_g"] = value.norm(dim=(1, 2), keepdim=True)
            weights[f"{name}_v"] = value * 1.7
        else:
            weights[name] = value
    return weights


@pytest.fixture(scope="module")
def least() -> BigVGAN:
    return random_bigvgan(LEAST)


@pytest.fixture
def folder(tmp_path: Path, least: BigVGAN) -> Path:
    """Folder of v1, whose configuration lacks the keys of the final layer."""
    config = {name: value for name, value in vars(LEAST).items() if not name.startswith("use_")}
    (tmp_path / "config.json").write_text(json.dumps(config | TRAINING))
    save_file(normed(least), tmp_path / "generator.safetensors")
    return tmp_path


def assert_same(network: BigVGAN, expected: BigVGAN) -> None:
    assert network.config == expected.config
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert network.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert network.state_dict()[name].dtype == torch.float32, name
        assert torch.allclose(network.state_dict()[name], value, rtol=1e-6, atol=1e-7), name


FORMS: dict[str, Callable[[BigVGAN], dict[str, Any]]] = {
    "published": lambda bigvgan: {"generator": normed(bigvgan)},
    "not nested": normed,
    "without weight norm": lambda bigvgan: {"generator": bigvgan.state_dict()},
    "double precision": lambda bigvgan: {
        name: value.double() for name, value in normed(bigvgan).items()
    },
}


@pytest.mark.parametrize("name", ["bigvgan_generator.pt", "generator.pt"])
@pytest.mark.parametrize("form", FORMS)
def test_pickles(folder: Path, least: BigVGAN, name: str, form: str) -> None:
    (folder / "generator.safetensors").unlink()
    torch.save(FORMS[form](least), folder / name)
    assert_same(load_bigvgan(folder), least)


def test_weights_do_not_hold_on_to_their_file(folder: Path, least: BigVGAN) -> None:
    path = folder / "bigvgan_generator.pt"
    (folder / "generator.safetensors").unlink()
    torch.save({"generator": least.state_dict()}, path)
    network = load_bigvgan(folder)
    path.write_bytes(bytes(path.stat().st_size))
    assert_same(network, least)


def test_v1_files_leave_out_how_it_ends(folder: Path) -> None:
    config = read_bigvgan(folder)
    assert (config.use_tanh_at_final, config.use_bias_at_final) == (True, True)


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


def test_graphs_are_of_one_generator(tmp_path: Path) -> None:
    copied = write_model(tmp_path / "model")
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
