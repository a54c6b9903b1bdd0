"""The upsampling convolution of HiFT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.networks.streaming import WHOLE, Piece, Streaming


class UpConv(nn.Conv1d, Streaming):
    """Nearest-neighbour repeat, then a causal convolution (Q23: not a transposed one).

    The kernel lies over few different inputs, each repeated. So there is one short kernel for each of the `rate` places
    of an output in its repeat, which `freeze` adds up from the published one, and nothing is repeated.
    """

    phases: torch.Tensor
    phase_bias: torch.Tensor | None

    def __init__(self, inputs: int, outputs: int, kernel: int, rate: int, *, delay: int = 0) -> None:
        super().__init__(inputs, outputs, kernel)
        self.rate, self.delay = rate, delay
        self.reach = upsampling_reach(kernel, rate)
        if self.reach:
            self.keeps = (inputs, self.reach)
        # Filled by `freeze`: (outputs * rate, inputs, reach + 1) and (outputs * rate,).
        self.register_buffer("phases", None, persistent=False)
        self.register_buffer("phase_bias", None, persistent=False)

    @property
    def delayed(self) -> int:
        return self.rate * self.delay

    def freeze(self) -> None:
        outputs, inputs, kernel = self.weight.shape
        phases = self.weight.new_zeros(outputs, self.rate, inputs, self.reach + 1)
        for phase in range(self.rate):
            for tap in range(kernel):
                phases[:, phase, :, self.reach + (phase + tap - kernel + 1) // self.rate] += self.weight[:, :, tap]
        self.phases = phases.flatten(0, 1)
        if self.bias is not None:
            self.phase_bias = self.bias.repeat_interleave(self.rate)

    def forward(self, x: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:
        if self.training:  # on whole sequences; the weights are not to be frozen yet
            return super().forward(F.pad(x.repeat_interleave(self.rate, dim=2), (self.kernel_size[0] - 1, 0)))
        x = piece.extended(self, x, self.reach)
        x = F.conv1d(x.to(self.phases.dtype), self.phases, self.phase_bias).to(x.dtype)
        return x.unflatten(1, (-1, self.rate)).transpose(2, 3).flatten(2)


def upsampling_reach(kernel: int, rate: int) -> int:
    """Inputs to the left that an output of an `UpConv` depends on."""
    return -(-(kernel - 1) // rate)
