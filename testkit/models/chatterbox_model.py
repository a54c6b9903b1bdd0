"""Folders of Chatterbox in the published layout, with the sizes and weights of the golden sets."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill
from token2wav.families.cosyvoice2 import FlowConfig
from token2wav.families.cosyvoice2.flow import cosyvoice2_flow
from token2wav.networks.hift import HiFT
from token2wav.networks.sample_source import SampleSource
from token2wav.published.sizes import ConformerConfig, HiFTConfig, UNetConfig


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
    encoder = ConformerConfig(
        *(sizes[f"encoder{suffix}"] for suffix in ("", "_heads", "_units")),
        *sizes["encoder_layers"],
    )
    estimator = UNetConfig(
        *(sizes[name] for name in ("channels", "heads", "dim_head")), *sizes["layers"]
    )
    config = FlowConfig(6561, 192, 80, 3, 0.7, encoder, estimator)
    base, f0_channels = sizes["vocoder"]
    hift = HiFT(HiFTConfig(base_channels=base, f0_channels=f0_channels), SampleSource)
    flow = cosyvoice2_flow(config, mean_flow=mean_flow)
    parts: dict[str, nn.Module] = {"flow": fill(flow), "mel2wav": fill(hift)}
    return {
        f"{part}.{name}": value.clone()
        for part, network in parts.items()
        for name, value in network.state_dict().items()
    }


def write_conditionals(path: Path, golden: FamilyGolden) -> Path:
    """Writes the voice of a golden set as `conds.pt`."""
    prompt = golden["prompt_token"][None]
    conditionals = {
        "prompt_token": prompt,
        "prompt_token_len": torch.tensor([prompt.shape[1]]),
        "prompt_feat": golden["prompt_feat"][None],
        "prompt_feat_len": None,
        "embedding": golden["embedding"][None],
    }
    torch.save(
        {
            "t3": {"speaker_emb": torch.zeros(1, 256), "emotion_adv": torch.ones(1, 1, 1)},
            "gen": conditionals,
        },
        path,
    )
    return path
