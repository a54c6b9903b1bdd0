"""Decoder of Pocket TTS."""

from __future__ import annotations

import torch
from torch import nn

from token2wav.families.pocket_tts import PocketSizes
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.seanet_decoder import SeanetDecoder


class PocketDecoder(SeanetDecoder):
    """Decoder of Pocket TTS, from latents to audio."""

    def __init__(self, sizes: PocketSizes) -> None:
        super().__init__(sizes)
        self.input_channels = sizes.latent_dim
        self.latent_proj = nn.Conv1d(sizes.latent_dim, sizes.hidden_size, 1, bias=False)

    def forward(self, latents: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        return self.decode(self.latent_proj(latents), step)
