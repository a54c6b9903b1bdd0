"""Folders of NanoCodec models with random weights, as an archive or with its unpacked files."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_state
from token2wav.families.nanocodec.config import FORMAT, NanoCodecSizes
from token2wav.families.nanocodec.network import NanoCodec

_MODULES = "nemo.collections.tts.modules.audio_codec_modules."


def document(golden: FamilyGolden) -> dict[str, Any]:
    """Returns the content of `model_config.yaml`."""
    decoder, quantizer = golden.sizes["audio_decoder"], golden.sizes["vector_quantizer"]
    return {
        "sample_rate": golden.sizes["sample_rate"],
        "train_ds": {"batch_size": 16},  # the training is not read
        "audio_decoder": {"_target_": f"{_MODULES}CausalHiFiGANDecoder", **decoder},
        "vector_quantizer": {"_target_": f"{_MODULES}GroupFiniteScalarQuantizer", **quantizer},
    }


def published_weights(golden: FamilyGolden) -> dict[str, torch.Tensor]:
    """Returns the weights under their published names, with weight norm."""
    with torch.device("meta"):
        network = NanoCodec(FORMAT.read(NanoCodecSizes, golden.sizes))
    state: dict[str, torch.Tensor] = {}
    for name, value in network.state_dict().items():
        layer, _, parameter = name.rpartition(".")
        if parameter == "alpha":
            state[f"{layer}.activation.snake_act.alpha"] = torch.empty(value.shape)
            continue
        if parameter == "bias":
            state[f"{layer}.conv.bias"] = torch.empty(value.shape)
            continue
        start = f"{layer}.conv.parametrizations.weight.original"
        state[f"{start}0"] = torch.empty(len(value), 1, 1)
        state[f"{start}1"] = torch.empty(value.shape)
    weights = fill_state(state)
    unread = {"audio_encoder.pre_conv.conv.bias": torch.zeros(3)}  # the encoder is not read
    return unread | {f"audio_decoder.{name}": value for name, value in weights.items()}


def write_model(folder: Path, golden: FamilyGolden, *, compressed: bool = False) -> Path:
    """Writes an archive into a folder, and returns the folder."""
    weights = BytesIO()
    torch.save(published_weights(golden), weights)
    members = {
        "./model_config.yaml": yaml.safe_dump(document(golden)).encode(),
        "./model_weights.ckpt": weights.getvalue(),
    }
    write_archive(folder / "codec.nemo", members, compressed=compressed)
    return folder


def write_unpacked(
    folder: Path, golden: FamilyGolden, weights: str = "model_weights.safetensors"
) -> Path:
    """Writes the unpacked files of an archive, and returns their folder."""
    (folder / "model_config.yaml").write_text(yaml.safe_dump(document(golden)))
    save = save_file if weights.endswith(".safetensors") else torch.save
    save(published_weights(golden), folder / weights)
    return folder


def write_archive(path: Path, members: dict[str, bytes], *, compressed: bool = False) -> None:
    """Writes a tar file with a root folder and members."""
    with tarfile.open(path, "w:gz" if compressed else "w") as archive:
        root = tarfile.TarInfo("./")
        root.type = tarfile.DIRTYPE
        archive.addfile(root)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, BytesIO(content))
