"""Decoder of the MOSS Audio Tokenizer.

The decoder has no convolution. Transformers with a sliding window alternate with patches, which
turn the channels of a position into several positions.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from token2wav.families.moss import MossSizes, TransformerPart
from token2wav.layers.codebooks import ProjectedCodebooks
from token2wav.layers.combine import placed
from token2wav.layers.feed_forward import FeedForward
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.layers.window_transformer import (
    ProjectedTransformer,
    TransformerSizes,
    WindowTransformer,
    projection,
)
from token2wav.networks.waveform_network import WaveformNetwork

_NORM_EPS = 1e-5


class Moss(WaveformNetwork):
    """Decoder of the MOSS Audio Tokenizer, from codes to audio. Modules have the names of the
    published weights; the name of a decoder part is its index. If there are two channels, the audio
    has their samples in turn.
    """

    input_dtype = torch.int32

    def __init__(self, sizes: MossSizes) -> None:
        super().__init__()
        codes, windows = sizes.quantizer, dict(sizes.windows())
        self.input_channels = codes.num_quantizers
        self.frame_samples = sizes.channels * sizes.downsample_rate
        self.quantizer = ProjectedCodebooks(
            codes.num_quantizers, codes.codebook_size, codes.codebook_dim, codes.width
        )
        self.output_proj = projection(codes.width, codes.latents, bias=True)
        self.decoder = nn.ModuleDict(
            {
                str(index): _transformer(part, windows[index], sizes.channels > 1)
                if isinstance(part, TransformerPart)
                else Patches(part.patch_size)
                for index, part in enumerate(sizes.parts)
            }
        )
        self.output = placed(self.decoder.values())

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        x = self.output_proj(self.quantizer(codes).transpose(1, 2))
        for part in self.decoder.values():
            x = part(x, step)
        return x.transpose(1, 2)


def _transformer(part: TransformerPart, window: int, project_always: bool) -> ProjectedTransformer:
    """Makes a transformer.

    Args:
        window: positions that a position attends to, itself included.
        project_always: whether the projections exist even if they keep the number of channels, as
            in version 2 of the codec.
    """
    transformer = WindowTransformer(
        TransformerSizes(
            part.num_layers,
            part.d_model,
            part.num_heads,
            part.d_model // part.num_heads,
            window,
            part.max_period,
        ),
        partial(nn.LayerNorm, eps=_NORM_EPS),
        lambda: FeedForward(part.d_model, part.dim_feedforward),
    )
    return ProjectedTransformer(
        transformer,
        projection(part.input_dimension, part.d_model, always=project_always),
        projection(part.d_model, part.output_dimension, always=project_always),
    )


class Patches(nn.Module):
    """Patches: they turn the channels of a position into `size` positions with fewer channels.
    Channel c of position p comes from channel `size * c + p`.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Converts x (B, T, C) to (B, T * size, C // size)."""
        return x.unflatten(2, (-1, self.size)).transpose(2, 3).flatten(1, 2)
