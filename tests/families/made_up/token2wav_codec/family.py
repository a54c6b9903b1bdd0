"""Network of a codec: codes are embedded, and causal, centred and transposed convolutions turn them
into audio.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.family import Family
from token2wav.layers.combine import placed
from token2wav.layers.streaming import (
    OFFLINE,
    StreamConvTranspose,
    StreamStep,
    WaveformNetwork,
    causal_conv,
    centred_conv,
)
from token2wav.networks.weights import fitting_weights, floating_tensors, read_state


class Decoder(WaveformNetwork):
    """Decoder of a codec.

    Args:
        codebook_sizes: different codes in each codebook.
        frame_samples: samples of audio per frame; a multiple of 8.
        channels: channels of the first layers.
    """

    input_dtype = torch.int32

    def __init__(self, codebook_sizes: Sequence[int], frame_samples: int, channels: int) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = len(codebook_sizes), frame_samples
        self.tables = nn.ModuleList(nn.Embedding(size, channels) for size in codebook_sizes)
        self.before = causal_conv(channels, channels, 3)
        self.around = centred_conv(channels, channels, 5)
        self.up = StreamConvTranspose(channels, 4, 16, 8)
        self.out = StreamConvTranspose(4, 1, frame_samples // 8, frame_samples // 8)
        self.output = placed((self.before, self.around, self.up, self.out))

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of codes (B, codebooks, T)."""
        embedded = sum(table(codes[:, index]) for index, table in enumerate(self.tables)).transpose(
            1, 2
        )
        hidden = self.around(self.before(embedded, step).tanh(), step).tanh()
        return self.out(self.up(hidden, step).tanh(), step)


class Codec(Family):
    torch_only = "a codec"

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return Decoder(config.tokens.codebook_sizes, config.samples_per_token, config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        return fitting_weights(network, floating_tensors(read_state(path), path, str), path)


FAMILY = Codec()
