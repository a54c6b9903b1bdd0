"""The convolutions of HiFT: causal, downwards and upwards. With `history` they give only what has all it depends on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class CausalConv(nn.Conv1d):
    """Convolution that sees only the past: as many zeros on the left as the kernel reaches back.

    With `history`, here and below, inputs start in the middle of an utterance: no zeros stand for what was before, and
    there is no output where it would be needed. Outputs always end with the same position, so they are shorter.
    """

    @property
    def reach(self) -> int:
        return (self.kernel_size[0] - 1) * self.dilation[0]

    def forward(self, x: torch.Tensor, *, history: bool = False) -> torch.Tensor:
        return super().forward(x if history else F.pad(x, (self.reach, 0)))


class DownConv(nn.Conv1d):
    """Strided convolution whose output i ends at input i * stride."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(x, (self.stride[0] - 1, 0)))

    def last(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """The last `count` outputs, or as many as there are inputs for, from no more of x than they need."""
        stride, kernel = self.stride[0], self.kernel_size[0]
        count = min(count, (x.shape[2] - kernel) // stride + 1)
        return super().forward(ending(x, (count - 1) * stride + kernel))


class UpConv(nn.Conv1d):
    """Nearest-neighbour repeat, then a causal convolution (Q23: not a transposed one).

    The kernel lies over few different inputs, each repeated. So there is one short kernel for each of the `rate` places
    of an output in its repeat, which `freeze` adds up from the published one, and nothing is repeated.
    """

    phases: torch.Tensor
    phase_bias: torch.Tensor | None

    def __init__(self, inputs: int, outputs: int, kernel: int, rate: int) -> None:
        super().__init__(inputs, outputs, kernel)
        self.rate = rate
        # Filled by `freeze`: (outputs * rate, inputs, reach + 1) and (outputs * rate,).
        self.register_buffer("phases", None, persistent=False)
        self.register_buffer("phase_bias", None, persistent=False)

    @property
    def reach(self) -> int:
        """Inputs to the left that an output depends on."""
        return upsampling_reach(self.kernel_size[0], self.rate)

    def freeze(self) -> None:
        outputs, inputs, kernel = self.weight.shape
        phases = self.weight.new_zeros(outputs, self.rate, inputs, self.reach + 1)
        for phase in range(self.rate):
            for tap in range(kernel):
                phases[:, phase, :, self.reach + (phase + tap - kernel + 1) // self.rate] += self.weight[:, :, tap]
        self.phases = phases.flatten(0, 1)
        if self.bias is not None:
            self.phase_bias = self.bias.repeat_interleave(self.rate)

    def forward(self, x: torch.Tensor, *, history: bool = False) -> torch.Tensor:
        if self.training:  # the weights are not to be frozen yet
            return super().forward(F.pad(x.repeat_interleave(self.rate, dim=2), (self.kernel_size[0] - 1, 0)))
        x = F.conv1d(x if history else F.pad(x, (self.reach, 0)), self.phases, self.phase_bias)
        return x.unflatten(1, (-1, self.rate)).transpose(2, 3).flatten(2)


def upsampling_reach(kernel: int, rate: int) -> int:
    """Inputs to the left that an output of an `UpConv` depends on."""
    return -(-(kernel - 1) // rate)


def ending(x: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` positions of x (B, C, T), a view."""
    return x[:, :, x.shape[2] - count :]
