"""Decoder of Mimi."""

from __future__ import annotations

import torch

from token2wav.families.mimi import MimiSizes
from token2wav.layers.codebooks import Quantizer
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.seanet_decoder import SeanetDecoder


class Mimi(SeanetDecoder):
    """Decoder of Mimi, from codes to audio."""

    input_dtype = torch.int32

    def __init__(self, sizes: MimiSizes) -> None:
        super().__init__(sizes)
        self.input_channels = sizes.num_quantizers
        self.quantizer = Quantizer(
            sizes.num_quantizers,
            sizes.num_semantic_quantizers,
            sizes.codebook_size,
            sizes.codebook_dim,
            sizes.hidden_size,
        )

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        return self.decode(self.quantizer(codes), step)
