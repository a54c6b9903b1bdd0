"""Start of the vocoder's training: its weights express a vocoder of the old kind, which it needn't
learn.

The log-mel is drawn through the network, past its activations, to the log-magnitudes of the
spectrum that it makes. All phases are zero, so that every window is one pulse. That is a monotonous
robot, but one that can be understood; pitch and breath are left to training. It saves the hours in
which training would find out what a mel means.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from token2wav.networks.configs import HiFTConfig
from token2wav.networks.hift import HiFT
from token2wav_voice.features import PROMPT_BANDS, slaney_filters

_OTHERS = 0.1  # what remains of all other weights: enough to learn from, too little to disturb
# Of every second bin, in natural logarithm. Were all alike a pulse would be at the edges of its
# window, where that is zero, and phases, which keep within one radian, cannot move it. With half of
# the bins there is a second one, in the middle.
_ODD_BINS = -4.0


@torch.no_grad()
def start_as_vocoder(hift: HiFT, mean_mel: torch.Tensor) -> None:
    """Sets the weights of a HiFT with one upsampling stage of rate 2 and windows of two mel frames.

    Args:
        hift: not frozen yet.
        mean_mel: (bands,) about which the activations work.
    """
    config = hift.config
    bands = config.in_channels
    # a value and its negative: one of them passes
    both = torch.cat((torch.eye(bands), -torch.eye(bands)))
    undo = both.T / (1 + config.lrelu_slope)  # of LeakyReLU of both, to the value again

    for module in (*hift.ups, *hift.source_downs, hift.conv_post):
        _scale(module, _OTHERS)
    for block in (*hift.resblocks, *hift.source_resblocks):
        for conv in block.modules():
            if isinstance(conv, nn.Conv1d):
                _scale(conv, _OTHERS)

    weight, bias = _parameters(hift.conv_pre)
    weight[: 2 * bands] = 0
    # one frame ahead, so that the next stage can stand between two frames
    weight[: 2 * bands, :, 1] = both
    bias[: 2 * bands] = -both @ mean_mel
    _assign(hift.conv_pre, weight, bias)

    weight, bias = _parameters(hift.ups[0])
    for tap in (1, 2):  # the frame itself, and then half way to the next
        weight[: 2 * bands, : 2 * bands, tap] += 0.5 * both @ undo
    _assign(hift.ups[0], weight, bias)

    weight, bias = _parameters(hift.conv_post)
    bins = config.n_fft // 2 + 1
    spread = _bands_to_bins(config)  # (bins, bands)
    # LeakyReLU of torch's own slope comes before
    weight[:bins, : 2 * bands, -1] += spread @ both.T / 1.01
    bias[:bins] = spread @ mean_mel
    bias[1:bins:2] += _ODD_BINS
    bias[bins:] = 0
    _assign(hift.conv_post, weight, bias)
    # the absolute value of an F0 of zero would learn nothing
    hift.f0_predictor.classifier.bias.fill_(1.0)


def _bands_to_bins(config: HiFTConfig) -> torch.Tensor:
    """Makes a matrix (bins, bands) that interpolates between the centres of mel bands."""
    fine = 8  # times the resolution, so that the lowest bands have a centre of their own
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
        conv.weight = weight  # through the weight norm
    else:
        conv.weight.copy_(weight)
    conv.bias.copy_(bias)


def _scale(conv: nn.Module, factor: float) -> None:
    weight, bias = _parameters(conv)
    _assign(conv, weight * factor, bias * factor)
