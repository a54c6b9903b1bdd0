"""Decoder of the Higgs Audio tokenizer v2."""

from __future__ import annotations

import torch
from torch import nn

from token2wav.families.higgs import HiggsSizes
from token2wav.layers.codebooks import ProjectedCodebooks
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.symmetric_decoder import SymmetricDecoder, Variant
from token2wav.networks.waveform_network import WaveformNetwork


class Higgs(WaveformNetwork):
    """Decoder of the Higgs Audio tokenizer, from codes to audio. Modules have the names of the
    published weights.
    """

    input_dtype = torch.int32

    def __init__(self, sizes: HiggsSizes) -> None:
        super().__init__()
        width = sizes.quantizer_width
        self.input_channels, self.frame_samples = sizes.codebooks, sizes.frame_samples
        assert sizes.codebook_dim is not None  # checked
        self.quantizer = ProjectedCodebooks(
            self.input_channels, sizes.codebook_size, sizes.codebook_dim, width
        )
        self.fc2 = nn.Linear(width, sizes.latents)
        self.acoustic_decoder = SymmetricDecoder(sizes, Variant(whole_frames=True))
        self.output = self.acoustic_decoder.place()

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        latents = self.fc2(self.quantizer(codes).transpose(1, 2)).transpose(1, 2)
        return self.acoustic_decoder(latents, step)
