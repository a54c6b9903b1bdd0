"""Speech decoder of Audex."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.families.audex import AudexSizes
from token2wav.layers.combine import Residual, placed
from token2wav.layers.convolutions import StreamConv, causal_conv
from token2wav.layers.feed_forward import FeedForward
from token2wav.layers.scalar_codes import ScalarCodes
from token2wav.layers.streaming import OFFLINE, StreamStep, Timing
from token2wav.layers.window_transformer import TransformerSizes, WindowTransformer
from token2wav.networks.waveform_network import WaveformNetwork

_EPS = 1e-6
_ROPE_BASE = 10_000.0


class AudexDecoder(WaveformNetwork):
    """Decoder from codes to audio: a convolution over later tokens, a causal transformer, and the
    samples of each position.

    Modules have the names of the published weights, without their prefixes.
    """

    input_channels, input_dtype = 1, torch.int32

    def __init__(self, sizes: AudexSizes) -> None:
        super().__init__()
        self.frame_samples, width = sizes.hop_length, sizes.hidden_dim
        self.codes = ScalarCodes(sizes.codebook_levels, to_one=True)
        self.project_out = nn.Linear(sizes.token_embed_dim, sizes.vq_dim)
        self.fc_post_a = nn.Linear(sizes.vq_dim, width, bias=False)
        ahead = sizes.lookahead_steps
        conv = StreamConv(width, width, ahead + 1, right=ahead, groups=width, bias=False)
        proj = causal_conv(width, width, 1, bias=False)
        self.lookahead = Residual(width, {"conv": conv, "act": nn.SiLU(), "proj": proj})
        self.transformer = WindowTransformer(
            TransformerSizes(
                sizes.depth,
                width,
                sizes.heads,
                sizes.pos_meb_dim,
                sizes.window,
                _ROPE_BASE,
                scaled=False,
            ),
            partial(nn.RMSNorm, eps=_EPS),
            lambda: FeedForward(width, 4 * width, F.silu),
        )
        self.final_layer_norm = nn.RMSNorm(width, _EPS)
        self.head = nn.Linear(width, sizes.hop_length, bias=False)
        delay = placed((self.lookahead, self.transformer)).delay
        self.output = Timing(sizes.hop_length * delay)

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        x = self.fc_post_a(self.project_out(self.codes(codes).transpose(1, 2)))
        x = self.lookahead(x.transpose(1, 2), step).transpose(1, 2)
        x = self.final_layer_norm(self.transformer(x, step))
        return self.head(x).tanh().flatten(1)[:, None]
