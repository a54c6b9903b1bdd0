"""First weights of the vocoder, which make it a simple vocoder before any training.

The weights pass the log-mel through the network, unchanged by the activations, to the
log-magnitudes of the output spectrum. All phases are zero, so that every window is one pulse. The
result sounds like a monotonous robot, but the words can be understood. Training then learns pitch
and breath. This saves the hours in which training would learn the meaning of a mel.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from token2wav.networks.hift import HiFT
from token2wav.published.sizes import HiFTConfig
from token2wav_voice.features import PROMPT_BANDS, slaney_filters

_OTHERS = 0.1  # factor of all other weights: large enough to learn, too small to disturb
# Change of every second bin, in natural logarithm. If all bins were alike, the pulse would be at
# the edges of its window, where the window is zero. The phases stay within one radian and cannot
# move it. With half of the bins there is a second pulse in the middle.
_ODD_BINS = -4.0


@torch.no_grad()
def start_as_vocoder(hift: HiFT, mean_mel: torch.Tensor) -> None:
    """Sets the weights of a HiFT with one upsampling stage of rate 2 and windows of two mel frames.

    Args:
        hift: vocoder to change; it must not be frozen.
        mean_mel: mean (bands,) of the mel, which becomes zero at the activations.
    """
    config = hift.config
    bands = config.in_channels
    # a value and its negative; the activation passes the positive one
    both = torch.cat((torch.eye(bands), -torch.eye(bands)))
    undo = both.T / (1 + config.lrelu_slope)  # returns the value from the activations of both

    for module in (*hift.ups, *hift.source_downs, hift.conv_post):
        _scale(module, _OTHERS)
    for block in (*hift.resblocks, *hift.source_resblocks):
        for conv in block.modules():
            if isinstance(conv, nn.Conv1d):
                _scale(conv, _OTHERS)

    weight, bias = _parameters(hift.conv_pre)
    weight[: 2 * bands] = 0
    # one frame ahead, so that the next stage can interpolate between two frames
    weight[: 2 * bands, :, 1] = both
    bias[: 2 * bands] = -both @ mean_mel
    _assign(hift.conv_pre, weight, bias)

    weight, bias = _parameters(hift.ups[0])
    for tap in (1, 2):  # the frame itself, and then the middle between it and the next frame
        weight[: 2 * bands, : 2 * bands, tap] += 0.5 * both @ undo
    _assign(hift.ups[0], weight, bias)

    weight, bias = _parameters(hift.conv_post)
    bins = config.n_fft // 2 + 1
    spread = _bands_to_bins(config)  # (bins, bands)
    # The LeakyReLU before it has torch's default slope of 0.01.
    weight[:bins, : 2 * bands, -1] += spread @ both.T / 1.01
    bias[:bins] = spread @ mean_mel
    bias[1:bins:2] += _ODD_BINS
    bias[bins:] = 0
    _assign(hift.conv_post, weight, bias)
    # The absolute value of F0 has no gradient at zero.
    hift.f0_predictor.classifier.bias.fill_(1.0)


def _bands_to_bins(config: HiFTConfig) -> torch.Tensor:
    """Returns a matrix (bins, bands) that interpolates between the centres of mel bands."""
    fine = 8  # factor of the resolution, so that each of the lowest bands has its own centre
    filters = slaney_filters(config.sampling_rate, fine * config.n_fft, PROMPT_BANDS)
    centres = filters @ np.arange(filters.shape[1]) / filters.sum(axis=1) / fine
    bins = np.arange(config.n_fft // 2 + 1)
    spread = np.stack([np.interp(bins, centres, row) for row in np.eye(PROMPT_BANDS)], axis=1)
    return torch.from_numpy(spread).float()


def _parameters(conv: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(conv, nn.Conv1d)
    assert conv.bias is not None
    return conv.weight.detach().clone(), conv.bias.detach().clone()


def _assign(conv: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    assert isinstance(conv, nn.Conv1d)
    assert conv.bias is not None
    if parametrize.is_parametrized(conv, "weight"):
        conv.weight = weight  # the parametrization splits it into norm and direction
    else:
        conv.weight.copy_(weight)
    conv.bias.copy_(bias)


def _scale(conv: nn.Module, factor: float) -> None:
    weight, bias = _parameters(conv)
    _assign(conv, weight * factor, bias * factor)
