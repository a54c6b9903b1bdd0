"""Family of VoxCPM: the decoder of its AudioVAE, and its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.errors import CheckpointError
from token2wav.families.family import Family
from token2wav.families.voxcpm.config import VoxCPMSizes
from token2wav.layers.streaming import OFFLINE, StreamStep, WaveformNetwork
from token2wav.networks.codec_weights import plain_weights, transformers_name
from token2wav.networks.symmetric_decoder import SymmetricDecoder
from token2wav.networks.weights import (
    fitting_weights,
    floating_tensors,
    read_state,
)

_DECODER = "decoder."  # the rest of the file makes latents
_BOUNDARIES = "decoder.sr_bin_boundaries"
# Scale and bias of each range of sample rates, before a layer of the decoder
_RATE = re.compile(r"decoder\.sr_cond_model\.(\d{1,2})\.(scale|bias)_embed\.weight")
_RATE_WEIGHTS = {"scale": "weight", "bias": "bias"}


class AudioVAE(WaveformNetwork):
    """Decoder from latents to audio."""

    def __init__(self, sizes: VoxCPMSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.input_channels, self.frame_samples = sizes.latent_dim, sizes.frame_samples
        self.decoder = SymmetricDecoder(
            sizes.decoder,
            causal=True,
            depthwise=sizes.depthwise,
            scaled=sizes.sr_bin_boundaries is not None,
        )
        self.output = self.decoder.place()

    def forward(self, latents: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of latents (B, latent_dim, T)."""
        return torch.tanh(self.decoder(latents, step))


class VoxCPMFamily(Family):
    """Family of VoxCPM."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return AudioVAE(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        sizes: VoxCPMSizes = network.sizes
        state = read_state(path, (_DECODER,), wrappers=("state_dict",))
        boundaries = state.pop(_BOUNDARIES, None)
        expected = sizes.sr_bin_boundaries
        if isinstance(boundaries, torch.Tensor) and boundaries.tolist() != list(expected or ()):
            raise CheckpointError(
                f"{path}: '{_BOUNDARIES}' is {boundaries.tolist()!s:.80}, but sr_bin_boundaries of "
                f"the configuration are {expected}"
            )
        named = floating_tensors(state, path, lambda name: _current_name(name, sizes))
        rows = len(expected or ()) + 1
        for name, value in named.items():
            # Another number of rows stays as it is, and is refused because of its shape.
            if ".scale." in name and value.dim() == 2 and len(value) == rows:
                named[name] = value[sizes.rate_range]
        return fitting_weights(network, plain_weights(named, path), path)


def _current_name(name: str, sizes: VoxCPMSizes) -> str:
    """Returns the name that a published weight has in `AudioVAE`."""
    if match := _RATE.fullmatch(name):
        block = int(match[1]) - (2 if sizes.depthwise else 1)
        return f"decoder.block.{block}.scale.{_RATE_WEIGHTS[match[2]]}"
    return transformers_name(name, len(sizes.decoder_rates), depthwise=sizes.depthwise)


FAMILY = VoxCPMFamily()
