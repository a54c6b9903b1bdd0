"""Models of any size with random weights: speed does not depend on the training of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from token2wav import Voice
from token2wav.assembly import flow_networks
from token2wav.config.model_config import ModelConfig
from token2wav.families.chatterbox import ChatterboxConfig
from token2wav.families.cosyvoice2 import CosyVoice2Config, FlowConfig
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.qwen25_omni import BigVGANSection, DitSection, Qwen25OmniConfig
from token2wav.families.stepaudio2 import DiTConfig, StepAudio2Config
from token2wav.families.streamflow import StreamFlowConfig, StreamFlowSection
from token2wav.published.registry import read_config
from token2wav.published.sizes import (
    BigVGANConfig,
    ConformerConfig,
    HiFTConfig,
    ScheduleConfig,
    UNetConfig,
)

_DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
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
    mel = random.standard_normal((config.prompt_frames(count)[-1], config.mel_bands))
    tokens = config.tokens.draw(count, random)
    return Voice(tokens, mel, random.standard_normal(config.speaker_size))


def resized_yaml(sizes: Mapping[str, int]) -> str:
    """Returns the tiny model's `cosyvoice3.yaml` with other sizes, by their keys in that file."""
    text = TEMPLATE.read_text()
    for key, value in sizes.items():
        text, count = re.subn(rf"(?m)^( +{key}:) \d+$", rf"\1 {value}", text)
        if count != 1:
            raise ValueError(f"{key} occurs {count} times in {TEMPLATE}, expected once")
    return text


def random_model(folder: Path, sizes: Mapping[str, int]) -> Path:
    """Writes a model folder with random weights and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cosyvoice3.yaml").write_text(resized_yaml(sizes))
    return fill_randomly(folder)


def model_folder(parent: Path, size: str) -> Path:
    """Writes a model folder, and returns it.

    The size is a key of `SIZES`, or `full`, the public size, which takes 5 s and 1.4 GB.
    """
    if size != "full":
        return random_model(parent / size, SIZES[size])
    folder = parent / size
    folder.mkdir()
    (folder / "cosyvoice3.yaml").write_text(FULL_YAML.read_text())
    return fill_randomly(folder)


def fill_randomly(folder: Path) -> Path:
    """Writes random weights that fit a folder's configuration, and returns the folder."""
    config: Any = read_config(folder)
    torch.manual_seed(0)
    networks = flow_networks(config, "float32")
    save_file(networks.flow.state_dict(), folder / "flow.safetensors")
    hift = isinstance(config.vocoder, HiFTConfig)
    vocoder = (
        folder / "hift.safetensors"
        if hift
        else folder / config.vocoder_folder / "generator.safetensors"
    )
    save_file(networks.vocoder.state_dict(), vocoder)
    return folder


def public_configs() -> dict[str, ModelConfig]:
    """Makes the configuration of every family at its published size, by names for tables.

    BigVGAN has the size of the public `bigvgan_v2_22khz_80band_256x`, after the flow of CosyVoice3.
    StreamFlow has published no weights. Its flow has the sizes of StreamFlow-SR, and its BigVGAN
    has the widths of the public one.
    """
    cosyvoice3 = CosyVoice3Config.read(FULL_YAML.parent)
    encoder, unet = ConformerConfig(512, 8, 2048, 6, 4), UNetConfig(256, 8, 64, 12, 4)
    sizes: dict[str, Any] = {
        "vocab_size": 6561,
        "spk_embed_dim": 192,
        "mel_bands": 80,
        "pre_lookahead_len": 3,
        "inference_cfg_rate": 0.7,
        "encoder": encoder,
    }
    flow: FlowConfig[UNetConfig] = FlowConfig(**sizes, estimator=unet)
    dit: FlowConfig[DiTConfig] = FlowConfig(**sizes, estimator=DiTConfig(512, 8, 64, 16))
    moss = replace(flow, vocab_size=20480, block_tokens=5, ratio=4)
    turbo = replace(flow, inference_cfg_rate=0.0, n_timesteps=2)
    hift, rate = HiFTConfig(), 25
    s3gen: dict[str, Any] = {"mean_flow": False, "file": "s3gen.safetensors"}
    meanflow: dict[str, Any] = {"mean_flow": True, "file": "s3gen_meanflow.safetensors"}
    linear = ScheduleConfig("linear")
    guided = StreamFlowSection()
    bigvgan = BigVGANConfig(
        resblock="1",
        upsample_rates=(4, 4, 2, 2, 2, 2),
        upsample_kernel_sizes=(8, 8, 4, 4, 4, 4),
        upsample_initial_channel=1536,
        resblock_kernel_sizes=(3, 7, 11),
        resblock_dilation_sizes=((1, 3, 5),) * 3,
        activation="snakebeta",
        snake_logscale=True,
        num_mels=80,
        hop_size=256,
        sampling_rate=22050,
        use_tanh_at_final=False,
        use_bias_at_final=False,
    )
    bigvgan_16khz = replace(
        bigvgan,
        upsample_rates=(10, 4, 2, 2),
        upsample_kernel_sizes=(20, 8, 4, 4),
        hop_size=160,
        sampling_rate=16000,
    )
    sway = ScheduleConfig("sway", method="rk4")
    return {
        "CosyVoice3": cosyvoice3,
        "CosyVoice2": CosyVoice2Config.of(flow, hift, rate),
        "MOSS-Speech": CosyVoice2Config.of(moss, hift, 12.5),
        "Step-Audio2": StepAudio2Config.of(dit, hift, rate),
        "Chatterbox": ChatterboxConfig.of(flow, hift, rate, **s3gen),
        "Chatterbox Turbo": ChatterboxConfig.of(turbo, hift, rate, schedule=linear, **meanflow),
        "StreamFlow": StreamFlowConfig.of(guided.flow(), bigvgan_16khz, rate),
        "Qwen2.5-Omni": Qwen25OmniConfig.of(
            DitSection().flow(), BigVGANSection().vocoder(), schedule=sway
        ),
        "BigVGAN": CosyVoice3Config.of(cosyvoice3.flow, bigvgan, 22050 / 512),
    }
