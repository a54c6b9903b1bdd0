"""Family of VibeVoice: its acoustic decoder, with modules named as in Microsoft's code, and its
weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.family import Family
from token2wav.families.vibevoice.config import LAYOUTS, VibeVoiceSizes
from token2wav.layers.combine import Chain, placed, run
from token2wav.layers.feed_forward import FeedForward
from token2wav.layers.streaming import (
    OFFLINE,
    ON_TIME,
    StreamConvTranspose,
    StreamModule,
    StreamStep,
    Timing,
    WaveformNetwork,
    causal_conv,
)
from token2wav.networks.weights import fitting_weights, floating_tensors, read_state

_FACTORS = ("scaling_factor", "bias_factor")
_WRAPPED = re.compile(r"(\.conv|\.convtr)+(\.weight|\.bias)$")  # names of wrappers
_UPSAMPLING = re.compile(r"(upsample_layers\.\d+)\.0\.")
_STAGE = re.compile(r"conv_layers\.(\d+)\.(stage\.)?")


class VibeVoiceDecoder(WaveformNetwork):
    """Decoder from latents to audio.

    Latents are taken as the diffusion head of the language model returns them. If the folder has
    a scale and a bias for latents, the decoder divides by the scale and subtracts the bias.

    Args:
        sizes: sizes of the decoder.
    """

    def __init__(self, sizes: VibeVoiceSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.input_channels, self.frame_samples = sizes.hidden_size, sizes.frame_samples
        ratios, depths = sizes.downsampling_ratios[::-1], sizes.depths[::-1]
        widths = [sizes.num_filters << doublings for doublings in range(len(depths))][::-1]
        self.scaling_factor, self.bias_factor = (nn.Parameter(torch.ones(())) for _ in range(2))
        self.upsample_layers = nn.ModuleList(
            [causal_conv(sizes.hidden_size, widths[0], sizes.kernel_size)]
        )
        for ratio, width in zip(ratios, widths, strict=False):
            self.upsample_layers.append(
                StreamConvTranspose(width, width // 2, 2 * ratio, ratio, cut="end")
            )
        self.stages = nn.ModuleList(
            Chain(VibeVoiceBlock(width, sizes) for _ in range(depth))
            for width, depth in zip(widths, depths, strict=True)
        )
        self.head = causal_conv(sizes.num_filters, 1, sizes.kernel_size)
        pairs = zip(self.upsample_layers, self.stages, strict=True)
        self._order = [*(layer for pair in pairs for layer in pair), self.head]
        self.output = placed(self._order)

    def forward(self, latents: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of latents (B, hidden_size, T)."""
        return run(self._order, latents / self.scaling_factor - self.bias_factor, step)


class VibeVoiceBlock(StreamModule):
    """A convolution of every channel, and a feed-forward part. Each follows a norm, and is scaled
    and added to its input.

    Args:
        channels: channels of input and output.
        sizes: sizes of the decoder.
    """

    def __init__(self, channels: int, sizes: VibeVoiceSizes) -> None:
        super().__init__()
        self.norm, self.ffn_norm = (nn.RMSNorm(channels, sizes.rms_norm_eps) for _ in range(2))
        self.mixer = causal_conv(channels, channels, sizes.kernel_size, groups=channels)
        self.ffn = FeedForward(
            channels, sizes.ffn_expansion * channels, names=("linear1", "linear2"), bias=True
        )
        self.gamma, self.ffn_gamma = (nn.Parameter(torch.ones(channels)) for _ in range(2))

    def place(self, timing: Timing = ON_TIME) -> Timing:
        return self.mixer.place(timing)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes x (B, C, T) to the same shape."""
        mixed = self.mixer(self.norm(x.transpose(1, 2)).transpose(1, 2), step)
        x = torch.addcmul(x, self.gamma[:, None], mixed).transpose(1, 2)
        return torch.addcmul(x, self.ffn_gamma, self.ffn(self.ffn_norm(x))).transpose(1, 2)


class VibeVoiceFamily(Family):
    """Family of VibeVoice."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return VibeVoiceDecoder(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        layout = LAYOUTS[network.sizes.layout]
        weights = {}
        if not layout.factors:
            weights = {"scaling_factor": torch.ones(()), "bias_factor": torch.zeros(())}
        factors = dict(zip(layout.factors, _FACTORS, strict=False))
        weights |= floating_tensors(
            read_state(path, (*factors, layout.prefix)),
            path,
            lambda name: factors.get(name) or _current_name(name.removeprefix(layout.prefix)),
        )
        return fitting_weights(network, weights, path)


def _current_name(name: str) -> str:
    """Returns the name that a weight has in `VibeVoiceDecoder`.

    Args:
        name: published name, in Microsoft's format or in the format of `transformers`.
    """
    name = _WRAPPED.sub(r"\2", _UPSAMPLING.sub(r"\1.", name))
    if name.startswith("stem.stage."):
        return name.replace("stem.stage.", "stages.0.")
    if name.startswith("stem."):
        return name.replace("stem.", "upsample_layers.0.")
    if match := _STAGE.match(name):
        kind = "stages" if match[2] else "upsample_layers"
        return f"{kind}.{int(match[1]) + 1}.{name[match.end() :]}"
    return name


FAMILY = VibeVoiceFamily()
