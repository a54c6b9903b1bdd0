"""Folders of Chatterbox as they are published, at the sizes of golden sets and with their weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.family_golden import FamilyGolden
from tests.support.random_weights import fill
from token2wav.families.cosyvoice2.flow import Flow
from token2wav.networks.configs import published_hift
from token2wav.networks.conformer import Conformer
from token2wav.networks.hift import HiFT
from token2wav.networks.unet import UNet


def write_model(folder: Path, golden: FamilyGolden, *, mean_flow: bool = False) -> Path:
    """Writes such a model, of which the rest makes voices of recordings, and returns its folder."""
    state = weights(golden, mean_flow=mean_flow)
    state["speaker_encoder.head.weight"] = torch.zeros(2, 2)
    state["tokenizer.window"] = torch.zeros(400)
    save_file(state, folder / ("s3gen_meanflow.safetensors" if mean_flow else "s3gen.safetensors"))
    return folder


def weights(golden: FamilyGolden, *, mean_flow: bool) -> dict[str, torch.Tensor]:
    """Weights of flow and vocoder under their public names."""
    sizes = golden.sizes
    width, (layers, up_layers), (mid_blocks, each) = sizes["encoder"], sizes["encoder_layers"], sizes["layers"]
    encoder = Conformer(width, sizes["encoder_heads"], sizes["encoder_units"], layers, up_layers, lookahead=3)
    unet = UNet(80, sizes["channels"], sizes["heads"], sizes["dim_head"], mid_blocks, each, 50, mean_flow=mean_flow)
    hift = HiFT(published_hift(*sizes["vocoder"], sample_phase=True))
    parts: dict[str, nn.Module] = {"flow": fill(Flow(6561, 192, 80, encoder, unet, width)), "mel2wav": fill(hift)}
    return {
        f"{part}.{name}": value.clone()
        for part, network in parts.items()
        for name, value in network.state_dict().items()
    }


def write_conditionals(path: Path, golden: FamilyGolden) -> Path:
    """Writes the voice of a golden set as `conds.pt`."""
    prompt = golden["prompt_token"][None]
    given = {
        "prompt_token": prompt,
        "prompt_token_len": torch.tensor([prompt.shape[1]]),
        "prompt_feat": golden["prompt_feat"][None],
        "prompt_feat_len": None,
        "embedding": golden["embedding"][None],
    }
    torch.save({"t3": {"speaker_emb": torch.zeros(1, 256), "emotion_adv": torch.ones(1, 1, 1)}, "gen": given}, path)
    return path
