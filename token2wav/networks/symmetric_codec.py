"""Codec with residual codebooks and a symmetric decoder, such as DAC."""

from __future__ import annotations

import torch

from token2wav.layers.codebooks import ProjectedCodebooks
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.symmetric_decoder import SymmetricDecoder
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.published.codec_sizes import SymmetricCodecSizes


class SymmetricCodec(WaveformNetwork):
    """Decoder from codes to audio."""

    input_dtype = torch.int32

    def __init__(self, sizes: SymmetricCodecSizes) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = sizes.n_codebooks, sizes.frame_samples
        self.quantizer = ProjectedCodebooks(
            sizes.n_codebooks, sizes.codebook_size, sizes.codebook_dim, sizes.latents
        )
        self.decoder = SymmetricDecoder(sizes)
        self.output = self.decoder.place()

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        return torch.tanh(self.decoder(self.quantizer(codes), step))
