"""ECAPA-TDNN, which turns the mel of a recording into a vector of its speaker. The edges of a mel
are padded with their reflection.

Modules have the names of Qwen2.5-Omni. Paper: "ECAPA-TDNN: Emphasized Channel Attention,
Propagation and Aggregation in TDNN Based Speaker Verification".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.published.sizes import EcapaConfig

_LEAST_VARIANCE = 1e-12


class TimeDelay(nn.Module):
    """Convolution that keeps the length, and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self._reach = (kernel - 1) * dilation // 2
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._reach:
            x = F.pad(x, (self._reach, self._reach), mode="reflect")
        return F.relu(self.conv(x))


class Res2Net(nn.Module):
    """Convolutions of parts of the channels. The input of each also has the output of the part
    before it, and the first part stays as it is.
    """

    def __init__(self, channels: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        part = channels // scale
        self._scale = scale
        self.blocks = nn.ModuleList(
            [TimeDelay(part, part, kernel, dilation) for _ in range(scale - 1)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = x.chunk(self._scale, dim=1)
        outputs = [first]
        for index, (block, part) in enumerate(zip(self.blocks, rest, strict=True)):
            outputs.append(block(part + outputs[-1] if index else part))
        return torch.cat(outputs, dim=1)


class Gate(nn.Module):
    """Squeeze and excitation: a factor for every channel, from the mean over time."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(channels, inner, 1), nn.Conv1d(inner, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=2, keepdim=True)
        return x * self.conv2(F.relu(self.conv1(mean))).sigmoid()


class EcapaBlock(nn.Module):
    def __init__(self, config: EcapaConfig, kernel: int, dilation: int) -> None:
        super().__init__()
        channels = config.channels[0]
        self.tdnn1, self.tdnn2 = TimeDelay(channels, channels), TimeDelay(channels, channels)
        self.res2net_block = Res2Net(channels, config.res2net_scale, kernel, dilation)
        self.se_block = Gate(channels, config.se_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))


class StatisticsPooling(nn.Module):
    """Mean and standard deviation over time, (B, C, T) to (B, 2 * C, 1), weighted by attention to
    the frames, for each channel.
    """

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.tdnn = TimeDelay(3 * channels, inner)
        self.conv = nn.Conv1d(inner, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        statistics = _statistics(x, torch.full_like(x, 1 / x.shape[2]))
        joined = torch.cat((x, *(value.expand_as(x) for value in statistics)), dim=1)
        attention = self.conv(self.tdnn(joined).tanh()).softmax(dim=2)
        return torch.cat(_statistics(x, attention), dim=1)


def _statistics(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes mean and standard deviation (B, C, 1) of x (B, C, T) over time."""
    mean = (weights * x).sum(dim=2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(dim=2, keepdim=True)
    return mean, variance.clamp(min=_LEAST_VARIANCE).sqrt()


class Ecapa(nn.Module):
    """ECAPA-TDNN, for whole recordings."""

    def __init__(self, config: EcapaConfig) -> None:
        super().__init__()
        self.config = config
        kernels, dilations = config.kernel_sizes, config.dilations
        self.blocks = nn.ModuleList(
            [
                TimeDelay(config.mel_dim, config.channels[0], kernels[0], dilations[0]),
                *(
                    EcapaBlock(config, kernel, dilation)
                    for kernel, dilation in zip(kernels[1:-1], dilations[1:-1], strict=True)
                ),
            ]
        )
        last = config.channels[-1]
        self.mfa = TimeDelay(last, last, kernels[-1], dilations[-1])
        self.asp = StatisticsPooling(last, config.attention_channels)
        self.fc = nn.Conv1d(2 * last, config.dim, 1)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        """Computes the vectors (B, dim) of mels (B, mel_dim, T) of at least `least_frames`."""
        x, outputs = mel, []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return self.fc(self.asp(self.mfa(torch.cat(outputs[1:], dim=1))))[:, :, 0]
