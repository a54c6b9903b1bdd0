"""Networks of CosyVoice1, the flow and the vocoder, with the parameter names of public files."""

from __future__ import annotations

import math

import torch
from torch import nn

from token2wav.config.block_grid import BlockGrid
from token2wav.families.cosyvoice1 import CosyVoice1Sizes
from token2wav.families.flow_network import FlowNetwork
from token2wav.layers.streaming import state_specs
from token2wav.networks.centred_unet import CentredUNet
from token2wav.networks.conformer import FlatConformer
from token2wav.networks.hift import HiFT
from token2wav.networks.sample_source import SampleSource
from token2wav.networks.waveform_network import WaveformNetwork


class CosyVoice1(WaveformNetwork):
    """Flow and vocoder, which the stage of the family runs one after the other."""

    input_channels, input_dtype, packs_linears = 1, torch.int32, False

    def __init__(self, sizes: CosyVoice1Sizes) -> None:
        super().__init__()
        self.sizes, self.frame_samples = sizes, sizes.frame_samples
        self.flow, self.hift = CosyVoice1Flow(sizes), HiFT(sizes.hift, SampleSource)
        self.output = self.hift.output

    @property
    def vocoder_bytes(self) -> int:
        """Bytes of the state of the vocoder for one stream."""
        specs = state_specs(self.hift).values()
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)

    def freeze(self) -> None:
        self.eval().requires_grad_(False)
        self.hift.freeze()  # its layers must not be frozen twice


class CosyVoice1Flow(FlowNetwork[CentredUNet]):
    """Flow with a conformer, a length regulator and a U-Net. Its public class is
    MaskedDiffWithXvec.
    """

    def __init__(self, sizes: CosyVoice1Sizes) -> None:
        super().__init__()
        encoder, bands = sizes.encoder, sizes.output_size
        self.mel_bands = bands
        self._grid = BlockGrid(sizes.block_size) if sizes.block_size else None
        self.input_embedding = nn.Embedding(sizes.vocab_size, encoder.size)
        self.spk_embed_affine_layer = nn.Linear(sizes.spk_embed_dim, bands)
        self.encoder = FlatConformer(encoder)
        self.encoder_proj = nn.Linear(encoder.size, bands)
        self.length_regulator = nn.ModuleDict({"model": _regulator(bands, sizes.regulator_layers)})
        estimator = CentredUNet(bands, sizes.levels, sizes.estimator)
        self.decoder = nn.ModuleDict({"estimator": estimator})

    def mu(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Computes the condition mu (B, bands, T) of mel frames.

        Args:
            tokens: (B, n) int32 tokens of the prompt, and of the window after it.
            places: (B, T) positions of the frames among the tokens, from 0 to n - 1. Between two
                tokens the encoded tokens are interpolated.
        """
        encoded = self.encoder_proj(self.encoder(self.input_embedding(tokens), self._grid))
        places, before = places[..., None], places.long()[..., None]
        after = (before + 1).clamp(max=tokens.shape[1] - 1)
        left, right = (
            encoded.gather(1, index.expand(-1, -1, self.mel_bands)) for index in (before, after)
        )
        frames = torch.lerp(left, right, (places - before).float())
        return self.length_regulator["model"](frames.transpose(1, 2))


def _regulator(bands: int, layers: int) -> nn.Sequential:
    """Makes the convolutions of the length regulator. A norm averages over all frames."""
    convolutions = [
        layer
        for _ in range(layers)
        for layer in (nn.Conv1d(bands, bands, 3, padding=1), nn.GroupNorm(1, bands), nn.Mish())
    ]
    return nn.Sequential(*convolutions, nn.Conv1d(bands, bands, 1))
