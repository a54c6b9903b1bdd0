"""Family of VoxCPM: the decoder of its AudioVAE, and its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from token2wav.config.model_config import StageName
from token2wav.errors import CheckpointError
from token2wav.families.codec_family import CodecFamily
from token2wav.families.voxcpm import WEIGHTS, VoxCPMSizes
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.codec_weights import converted_weights
from token2wav.networks.symmetric_decoder import SymmetricDecoder, Variant
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.networks.weights import read_state

_BOUNDARIES = "decoder.sr_bin_boundaries"
_SCALES = "decoder.sr_cond_model."  # scales and biases of each range of sample rates


class AudioVAE(WaveformNetwork):
    """Decoder from latents to audio."""

    def __init__(self, sizes: VoxCPMSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.input_channels, self.frame_samples = sizes.latent_dim, sizes.frame_samples
        variant = Variant(
            causal=True,
            whole_frames=True,
            depthwise=sizes.depthwise,
            scaled=sizes.sr_bin_boundaries is not None,
        )
        self.decoder = SymmetricDecoder(sizes.decoder, variant)
        self.output = self.decoder.place()

    def forward(self, latents: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        return torch.tanh(self.decoder(latents, step))


class VoxCPMFamily(CodecFamily):
    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        sizes: VoxCPMSizes = network.sizes
        state = read_state(path, WEIGHTS.parts, wrappers=WEIGHTS.wrappers)
        boundaries = state.pop(_BOUNDARIES, None)
        expected = sizes.sr_bin_boundaries
        if isinstance(boundaries, torch.Tensor) and boundaries.tolist() != list(expected or ()):
            raise CheckpointError(
                f"{path}: '{_BOUNDARIES}' is {boundaries.tolist()!s:.80}, but sr_bin_boundaries of "
                f"the configuration are {expected}"
            )
        rows = len(expected or ()) + 1
        for name, value in state.items():
            # Another number of rows stays as it is, and is refused because of its shape.
            scales = name.startswith(_SCALES) and isinstance(value, torch.Tensor)
            if scales and value.dim() == 2 and len(value) == rows:
                state[name] = value[sizes.rate_range]
        return converted_weights(network, state, path, WEIGHTS)


FAMILY = VoxCPMFamily(AudioVAE, WEIGHTS)
