"""Layers of HiFT: snake and residual blocks, upsampling, and the short-time Fourier transform with
its inverse.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from token2wav.layers.combine import placed
from token2wav.layers.streaming import (
    OFFLINE,
    ON_TIME,
    Delay,
    FreezableLayer,
    Overlap,
    StreamConv,
    Streaming,
    StreamModule,
    StreamStep,
    Timing,
    Window,
    causal_conv,
    centred_conv,
)

_SNAKE_EPS = 1e-9
_LEAST_FOLDED = 1e-2  # smallest α for which the epsilon of `Snake` is lost in rounding


class Snake(FreezableLayer):
    """Snake activation x + sin²(αx) / α with one α per channel, on a linear scale.

    Between convolutions `fold` moves α into their weights: the convolution before returns αx, and
    the convolution after takes α times the activation.
    """

    inverse: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))
        self.register_buffer("inverse", None, persistent=False)  # filled by `HiFT.freeze`
        self._takes_scaled = self._gives_scaled = False

    def freeze(self) -> None:
        self.inverse = self._inverse().detach()

    def fold(self, before: nn.Conv1d | None, after: nn.Conv1d) -> None:
        """Scales the weights of the neighbouring convolutions in place. It does nothing if an α is
        so small that the result would differ.
        """
        alpha = self.alpha.detach()
        # on `meta`, which is used to count sizes, α has no value
        if not alpha.is_meta and alpha.abs().min() < _LEAST_FOLDED:
            return
        after.weight /= alpha[:, None]
        self._gives_scaled = True
        if before is not None:
            before.weight *= alpha[:, None, None]
            if before.bias is not None:
                before.bias *= alpha
            self._takes_scaled = True

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        scaled = x if self._takes_scaled else x * self.alpha[:, None]
        sine = torch.sin(scaled)
        if self._gives_scaled:
            return torch.addcmul(scaled, sine, sine, out=out)
        return torch.addcmul(
            x, sine, sine * (self._inverse() if self.training else self.inverse), out=out
        )

    def coefficients(self) -> torch.Tensor:
        """Returns a, b and c of b x + c sin²(a x), (3, channels), after `freeze` and `fold`."""
        ones = torch.ones_like(self.alpha)
        scale = ones if self._takes_scaled else self.alpha
        if self._gives_scaled:
            return torch.stack((scale, scale, ones))
        return torch.stack((scale, ones, self.inverse[:, 0]))

    def _inverse(self) -> torch.Tensor:
        return 1 / (self.alpha + _SNAKE_EPS)[:, None]


class ResBlock(StreamModule, FreezableLayer):
    """Residual block. For each dilation it adds to its input: Snake, dilated convolution, Snake,
    convolution. The input is delayed to match.

    Args:
        channels, kernel, dilations: sizes of the convolutions.
        causal: whether the convolutions are causal; else they are centred.
    """

    def __init__(
        self,
        channels: int,
        kernel: int,
        dilations: tuple[int, ...],
        *,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.convs1, self.convs2, self.waits = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for dilation in dilations:
            conv1 = hift_conv(channels, channels, kernel, causal, dilation=dilation)
            conv2 = hift_conv(channels, channels, kernel, causal)
            self.convs1.append(weight_norm(conv1))
            self.convs2.append(weight_norm(conv2))
            self.waits.append(Delay(channels))
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        for conv1, conv2, wait in zip(self.convs1, self.convs2, self.waits, strict=True):
            late = placed((conv1, conv2), timing)
            wait.align(timing, late)  # type: ignore[operator]
            timing = late
        return timing

    def freeze(self) -> None:
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in layers:
            snake1.fold(None, conv1)  # type: ignore[operator]
            snake2.fold(conv1, conv2)  # type: ignore[operator]

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        layers = zip(
            self.activations1, self.convs1, self.activations2, self.convs2, self.waits, strict=True
        )
        for snake1, conv1, snake2, conv2, wait in layers:
            x = conv2(conv1(x, step, snake1), step, snake2).add_(wait(x, step))
        return x


def hift_conv(
    inputs: int, outputs: int, kernel: int, causal: bool, *, dilation: int = 1
) -> StreamConv:
    """Makes a causal convolution, or a centred one."""
    make = causal_conv if causal else centred_conv
    return make(inputs, outputs, kernel, dilation=dilation)


class UpConv(nn.Conv1d, Streaming, FreezableLayer):
    """Nearest-neighbour upsampling and a causal convolution. As in the public code, this is not a
    transposed convolution.

    The kernel covers only a few different inputs, because each is repeated. So there is one short
    kernel for each of the `rate` positions of an output within its repeat. `freeze` adds up these
    kernels from the published kernel, and then no input has to be repeated.
    """

    phases: torch.Tensor
    phase_bias: torch.Tensor | None

    def __init__(self, inputs: int, outputs: int, kernel: int, rate: int) -> None:
        super().__init__(inputs, outputs, kernel)
        self.rate = rate
        self.reach = -(-(kernel - 1) // rate)  # inputs before its own that an output depends on
        if self.reach:
            self.state_shape = (inputs, self.reach)
        # Filled by `freeze`: (outputs * rate, inputs, reach + 1) and (outputs * rate,).
        self.register_buffer("phases", None, persistent=False)
        self.register_buffer("phase_bias", None, persistent=False)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        self.input, self.output = timing, Timing(*(self.rate * count for count in timing))
        return self.output

    def freeze(self) -> None:
        outputs, inputs, kernel = self.weight.shape
        phases = self.weight.new_zeros(outputs, self.rate, inputs, self.reach + 1)
        for phase in range(self.rate):
            for tap in range(kernel):
                phases[:, phase, :, self.reach + (phase + tap - kernel + 1) // self.rate] += (
                    self.weight[:, :, tap]
                )
        self.phases = phases.flatten(0, 1)
        if self.bias is not None:
            self.phase_bias = self.bias.repeat_interleave(self.rate)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        if self.training:  # before `freeze`, and on whole sequences only
            return super().forward(
                F.pad(x.repeat_interleave(self.rate, dim=2), (self.kernel_size[0] - 1, 0))
            )
        x = step.with_context(self, x, self.reach)
        x = F.conv1d(x.to(self.phases.dtype), self.phases, self.phase_bias).to(x.dtype)
        return x.unflatten(1, (-1, self.rate)).transpose(2, 3).flatten(2)


class MirroredStart(Streaming):
    """One more position at the start, a mirror image of a later one, because the STFT has one
    window more than hops. In a stream the position reduces the delay by one instead.
    """

    def place(self, timing: Timing = ON_TIME) -> Timing:
        self.input, self.output = timing, Timing(timing.delay - 1, timing.extra + 1)
        return self.output

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        if step.state is None:
            return F.pad(x, (1, 0), mode="reflect")
        if step.first:
            start = self.output.delay
            x[:, :, start] = x[:, :, start + 2]
        return x


_MAX_MAGNITUDE = 100.0


def fourier_kernels(window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns convolution kernels of the short-time Fourier transform and of its inverse.

    16 samples need no FFT, and every backend has convolutions.

    Args:
        window: (n,) window.

    Returns:
        Kernels of analysis and of synthesis, each (n + 2, 1, n): real parts of all bins, then
        imaginary parts.
    """
    size = len(window)
    angle = (
        2 * math.pi / size * torch.outer(torch.arange(size // 2 + 1), torch.arange(size)).double()
    )
    waves = torch.cat((angle.cos(), -angle.sin()))  # (n + 2, n)
    # Every bin except the first and the last counts twice in the inverse transform, because it also
    # stands for its mirror image.
    twice = torch.full((size // 2 + 1,), 2.0, dtype=torch.float64)
    twice[0] = twice[-1] = 1.0
    inverse = waves * twice.repeat(2)[:, None] / size
    return (waves * window).float()[:, None], (inverse * window).float()[:, None]


class Analysis(Streaming):
    """STFT of a signal with half a window mirrored at both ends.

    Windows have n_fft samples and are `hop` samples apart.
    """

    kernels: torch.Tensor

    def __init__(self, n_fft: int, hop: int) -> None:
        super().__init__()
        self.window = Window(n_fft // 2, n_fft // 2, n_fft, hop)
        self.register_buffer(
            "kernels", fourier_kernels(torch.hann_window(n_fft))[0], persistent=False
        )

    def place(self, timing: Timing = ON_TIME) -> Timing:
        self.input, self.output = timing, self.window.output(timing)
        self.state_shape = (1, self.window.kept(timing))
        return self.output

    def forward(self, signal: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Transforms (B, 1, N) to (B, n_fft + 2, N / hop + 1): real, then imaginary parts."""
        edge = self.window.left
        return F.conv1d(
            step.with_context(self, signal, edge, edge, "reflect"),
            self.kernels,
            stride=self.window.stride,
        )


class Synthesis(StreamModule):
    """Inverse STFT of log-magnitudes and phases."""

    kernels: torch.Tensor
    weights: torch.Tensor

    def __init__(self, n_fft: int, hop: int) -> None:
        super().__init__()
        self.overlap = Overlap(n_fft + 3, n_fft, hop, cut=n_fft // 2)
        self.bins = n_fft // 2 + 1
        window = torch.hann_window(n_fft)
        self.register_buffer("kernels", fourier_kernels(window)[1], persistent=False)
        self.register_buffer("weights", window.square()[None, None], persistent=False)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        return self.overlap.place(timing)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Transforms the output (B, n_fft + 2, frames) of the last convolution of HiFT to audio (B,
        (frames - 1) * hop).
        """
        magnitude = x[:, : self.bins].exp().clamp(max=_MAX_MAGNITUDE)
        # As in the public code, the phase in radians is the sine of the network's output.
        angle = x[:, self.bins :].sin()
        # a channel of ones, from which the sum of overlapping windows is computed
        there = torch.ones_like(magnitude[:, :1])
        stft = torch.cat((magnitude * angle.cos(), magnitude * angle.sin(), there), dim=1)
        stft, hop = self.overlap.with_context(stft, step), self.overlap.stride
        audio = F.conv_transpose1d(stft[:, :-1], self.kernels, stride=hop)
        weight = F.conv_transpose1d(stft[:, -1:], self.weights, stride=hop)
        audio, weight = (
            self.overlap.complete_outputs(each, stft.shape[2], step) for each in (audio, weight)
        )
        return (audio / weight)[:, 0]
