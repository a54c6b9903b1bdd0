"""Models of any size are written with random weights: speed does not depend on what they were trained to say."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from token2wav import Voice
from token2wav.families.bigvgan.config import BigVGANConfig
from token2wav.families.bigvgan.network import BigVGAN
from token2wav.families.cosyvoice3.config import read_cosyvoice3
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.model_config import ModelConfig
from token2wav.networks.configs import HiFTConfig
from token2wav.networks.hift import HiFT

_DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
TEMPLATE = _DATA / "tiny" / "cosyvoice3.yaml"
FULL_YAML = _DATA / "full_size" / "cosyvoice3.yaml"  # the public size

_KEYS = ("channels", "dim", "depth", "heads", "dim_head", "base_channels", "cond_channels")
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(zip(_KEYS, (64, 64, 2, 2, 32, 32, 32), strict=True)),
    "small": dict(zip(_KEYS, (128, 128, 4, 4, 32, 64, 64), strict=True)),
}


def a_voice(config: ModelConfig, seed: int = 1, prompt_tokens: int = 75) -> Voice:
    """Makes a random voice that fits a model, without a prompt where the model takes none."""
    random, count = np.random.default_rng(seed), prompt_tokens if config.takes_prompt else 0
    mel = random.standard_normal((config.token_mel_ratio * count, config.mel_bands))
    tokens = random.integers(0, config.vocab_size, (count, *config.token_shape))
    return Voice(tokens, mel, random.standard_normal(config.speaker_size))


def resized_yaml(sizes: Mapping[str, int]) -> str:
    """Returns the tiny model's `cosyvoice3.yaml` with other sizes, by their keys in that file."""
    text = TEMPLATE.read_text()
    for key, value in sizes.items():
        text, count = re.subn(rf"(?m)^( +{key}:) \d+$", rf"\1 {value}", text)
        if count != 1:
            raise ValueError(f"{key} stands {count} times in {TEMPLATE}")
    return text


def random_model(folder: Path, sizes: Mapping[str, int], seed: int = 0) -> Path:
    """Writes a model folder with random weights and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cosyvoice3.yaml").write_text(resized_yaml(sizes))
    return fill_randomly(folder, seed)


def model_folder(parent: Path, size: str) -> Path:
    """Writes a model folder of a size of `SIZES`, or of `full`, the public one, and returns it: 5 s and 1.4 GB."""
    if size != "full":
        return random_model(parent / size, SIZES[size])
    folder = parent / size
    folder.mkdir()
    (folder / "cosyvoice3.yaml").write_text(FULL_YAML.read_text())
    return fill_randomly(folder)


# Public shape at the tiny model's width: four samples a frame at first, so that it looks as far as the large ones.
BIGVGAN = BigVGANConfig(
    resblock="1",
    upsample_rates=(4, 4, 2, 2, 2, 2),
    upsample_kernel_sizes=(8, 8, 4, 4, 4, 4),
    upsample_initial_channel=64,
    resblock_kernel_sizes=(3, 7, 11),
    resblock_dilation_sizes=((1, 3, 5), (1, 3, 5), (1, 3, 5)),
    activation="snakebeta",
    snake_logscale=True,
    num_mels=100,
    hop_size=256,
    sampling_rate=24000,
    use_tanh_at_final=False,
    use_bias_at_final=False,
)


def bigvgan_model(
    folder: Path, sizes: Mapping[str, int], vocoder: BigVGANConfig = BIGVGAN, ratio: int = 2, seed: int = 0
) -> Path:
    """Writes a model folder with random weights, a BigVGAN and the flow that fits it, and returns it.

    Args:
        folder: path of the new folder.
        sizes: changed sizes of the flow, by their keys.
        vocoder: configuration whose mel the flow makes.
        ratio: mel frames per token.
        seed: seed of the weights.
    """
    text = resized_yaml(sizes).partition("\nhift:")[0]
    text = re.sub(r"(?m): 80$", f": {vocoder.num_mels}", text)
    text = re.sub(r"(?m)^sample_rate: .*", f"sample_rate: {vocoder.sampling_rate}", text)
    text = re.sub(r"(?m)^token_mel_ratio: .*", f"token_mel_ratio: {ratio}", text)
    text = re.sub(
        r"(?m)^token_frame_rate: .*", f"token_frame_rate: !ref <sample_rate> / {ratio * vocoder.hop_size}", text
    )
    beside = folder / "bigvgan"
    beside.mkdir(parents=True)
    (folder / "cosyvoice3.yaml").write_text(f"{text}\nvocoder:\n    type: bigvgan\n    folder: bigvgan\n")
    (beside / "config.json").write_text(json.dumps(dataclasses.asdict(vocoder)))
    return fill_randomly(folder, seed)


def streamflow_model(folder: Path, flow: Mapping[str, Any], vocoder: BigVGANConfig, seed: int = 0) -> Path:
    """Writes a StreamFlow folder with random weights and a BigVGAN, and returns it.

    Args:
        folder: path of the new folder.
        flow: changes to the published sizes, by the keys of `streamflow.yaml`.
        vocoder: configuration that takes the flow's mel.
        seed: seed of the weights.
    """
    beside = folder / "bigvgan"
    beside.mkdir(parents=True)
    document = {
        "sample_rate": vocoder.sampling_rate,
        "flow": {"type": "streamflow", **flow},
        "vocoder": {"type": "bigvgan", "folder": "bigvgan"},
    }
    (folder / "streamflow.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    (beside / "config.json").write_text(json.dumps(dataclasses.asdict(vocoder)))
    return fill_randomly(folder, seed)


def codebook_model(
    folder: Path, sizes: Mapping[str, int], count: int = 8, vocab_size: int = 2048, merge: str = "sum", seed: int = 0
) -> Path:
    """Writes a model folder with random weights that takes 12.5 tokens of several codes a second, and returns it.

    Args:
        folder: path of the new folder.
        sizes: changed sizes of the model, by their keys.
        count: number of codes per token.
        vocab_size: number of codes in each codebook.
        merge: way to join the embeddings, as `CodebookConfig.merge`.
        seed: seed of the weights.
    """
    text = resized_yaml(sizes)
    for key, value in (("token_frame_rate", "12.5"), ("token_mel_ratio", "4"), ("chunk_size", "12")):
        text = re.sub(rf"(?m)^{key}: .*", f"{key}: {value}", text)
    codebooks = f"    codebooks:\n        count: {count}\n        merge: {merge}\n"
    text = text.replace("    vocab_size: 6561\n", f"    vocab_size: {vocab_size}\n{codebooks}")
    folder.mkdir(parents=True)
    (folder / "cosyvoice3.yaml").write_text(text)
    return fill_randomly(folder, seed)


def fill_randomly(folder: Path, seed: int = 0) -> Path:
    """Writes random weights that fit a folder's configuration, and returns the folder."""
    config = read_cosyvoice3(folder)
    torch.manual_seed(seed)
    save_file(Flow(config.flow).state_dict(), folder / "flow.safetensors")
    if isinstance(config.vocoder, HiFTConfig):
        save_file(HiFT(config.vocoder).state_dict(), folder / "hift.safetensors")
    else:
        save_file(BigVGAN(config.vocoder).state_dict(), folder / config.vocoder_folder / "generator.safetensors")
    return folder
