"""Encoder of the demo codec: it turns recordings into codes, which the decoder turns into speech.

The codes are those of NanoCodec: every value of a frame is rounded to one of a few levels (finite
scalar quantisation, Mentzer et al., 2023), and four values make one code.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.families.nanocodec import NanoCodecSizes
from token2wav.layers.scalar_codes import ScalarCodes
from token2wav_server.demo.speaker import MEL_PER_TOKEN
from token2wav_voice.features import PROMPT_BANDS

MODEL = Path(__file__).with_name("model")
ENCODER_FILE = "encoder.safetensors"
F0_SCALE_HZ = 100.0
FEATURES = PROMPT_BANDS + 2  # log-mel, F0, and whether a frame is voiced
WIDTH = 128
_UNITS = 3
_CONTEXT = 2  # frames before and after the frames of a code, in the first convolution
_MEL_MEAN, _MEL_DEVIATION = -6.0, 3.0
SLOPE = 0.1  # slope of activations for negative values


class Unit(nn.Module):
    """Residual unit that reads one frame on either side. Before training it is the identity.

    Args:
        width: channels.
        dilation: distance of the frames that it reads from the frame in the middle.
    """

    def __init__(self, width: int, dilation: int = 1) -> None:
        super().__init__()
        self.near = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        self.mix = nn.Conv1d(width, width, 1)
        nn.init.zeros_(self.mix.weight)
        assert self.mix.bias is not None
        nn.init.zeros_(self.mix.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(F.leaky_relu(self.near(F.leaky_relu(x, SLOPE)), SLOPE))


def features(mel: torch.Tensor, f0: torch.Tensor) -> torch.Tensor:
    """Joins the features of a recording, each with a deviation near 1.

    Args:
        mel: log-mel (B, T, 80).
        f0: pitch (B, T) in Hz; 0 in unvoiced frames.

    Returns:
        (B, 82, T).
    """
    scaled = (mel - _MEL_MEAN) / _MEL_DEVIATION
    pitch = torch.stack((f0 / F0_SCALE_HZ, (f0 > 0).to(f0.dtype)), dim=2)
    return torch.cat((scaled, pitch), dim=2).transpose(1, 2)


class Encoder(nn.Module):
    """Encoder from features to values between the lowest and the highest level.

    Args:
        config: groups and levels of the codes.
    """

    span: torch.Tensor
    shift: torch.Tensor
    middle: torch.Tensor

    def __init__(self, config: NanoCodecSizes) -> None:
        super().__init__()
        levels = torch.tensor(config.num_levels_per_group * config.num_groups)[:, None].float()
        self._shape = (config.num_groups, len(config.num_levels_per_group))
        self.strides = ScalarCodes(config.num_levels_per_group).strides
        # tanh spans all levels. An even number of levels has no level in the middle.
        for name, values in (
            ("span", (levels - 1) / 2),
            ("shift", (levels % 2 - 1) / 2),
            ("middle", levels // 2),
        ):
            self.register_buffer(name, values, persistent=False)
        self.listen = nn.Conv1d(FEATURES, WIDTH, MEL_PER_TOKEN + 2 * _CONTEXT, stride=MEL_PER_TOKEN)
        self.units = nn.Sequential(*(Unit(WIDTH) for _ in range(_UNITS)))
        self.values = nn.Conv1d(WIDTH, len(levels), 1)

    def forward(self, heard: torch.Tensor) -> torch.Tensor:
        """Computes level offsets (B, values, N) before rounding, from features (B, 82, 2 * N).

        The offset of the level in the middle is 0.
        """
        padded = F.pad(heard, (_CONTEXT, _CONTEXT), mode="replicate")
        exact = self.values(F.leaky_relu(self.units(self.listen(padded)), SLOPE))
        return torch.tanh(exact) * self.span + self.shift

    @torch.no_grad()
    def codes(self, heard: torch.Tensor) -> torch.Tensor:
        """Computes codes (B, groups, N) int64 from features (B, 82, 2 * N)."""
        digits = (self(heard).round() + self.middle).long().unflatten(1, self._shape)
        return (digits * self.strides).sum(dim=2)
