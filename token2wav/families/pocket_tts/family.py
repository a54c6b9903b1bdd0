"""Family of Pocket TTS: the decoder of its codec, and its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.family import Family
from token2wav.families.pocket_tts.config import PocketSizes
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.seanet_decoder import SeanetDecoder
from token2wav.networks.weights import fitting_weights, floating_tensors, read_state

_PROJECTION = "latent_proj."
_DECODER = "decoder."
_SEANET = "decoder_seanet."  # `decoder.` in the folders of Mimi


class PocketDecoder(SeanetDecoder):
    """Decoder of Pocket TTS, from latents to audio."""

    def __init__(self, sizes: PocketSizes) -> None:
        super().__init__(sizes)
        self.input_channels = sizes.latent_dim
        self.latent_proj = nn.Conv1d(sizes.latent_dim, sizes.hidden_size, 1, bias=False)

    def forward(self, latents: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of latents (B, latent_dim, T)."""
        return self.decode(self.latent_proj(latents), step)


class PocketFamily(Family):
    """Family of Pocket TTS."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return PocketDecoder(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        state = read_state(path, (_PROJECTION, _DECODER))  # the rest is the encoder
        tensors = floating_tensors(state, path, str)
        weights = {_short_name(name): value for name, value in tensors.items()}
        return fitting_weights(network, weights, path)


def _short_name(published: str) -> str:
    if published.startswith(_DECODER):
        published = published.removeprefix(_DECODER).replace(_SEANET, _DECODER)
    return published.replace(".conv.", ".")


FAMILY = PocketFamily()
