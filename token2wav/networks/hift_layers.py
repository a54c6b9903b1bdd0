"""Layers of HiFT: snake and residual blocks, upsampling, and the short-time Fourier transform with
its inverse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from token2wav.layers.combine import placed
from token2wav.layers.convolutions import StreamConv, Window, causal_conv, centred_conv, for_cudnn
from token2wav.layers.inverse_stft import OverlapAdd, fourier_kernels
from token2wav.layers.streaming import (
    OFFLINE,
    ON_TIME,
    Delay,
    FreezableLayer,
    Streaming,
    StreamModule,
    StreamStep,
    Timing,
)

_SNAKE_EPS = 1e-9
_LEAST_FOLDED = 1e-2  # smallest α for which the epsilon of `FoldableSnake` is lost in rounding


class FoldableSnake(FreezableLayer):
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
        self.activations1 = nn.ModuleList(FoldableSnake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(FoldableSnake(channels) for _ in dilations)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        for conv1, conv2, wait in zip(self.convs1, self.convs2, self.waits, strict=True):
            output = placed((conv1, conv2), timing)
            wait.align(timing, output)  # type: ignore[operator]
            timing = output
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
        x = F.conv1d(for_cudnn(x).to(self.phases.dtype), self.phases, self.phase_bias).to(x.dtype)
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


class Analysis(Streaming):
    """STFT of a signal with half a window mirrored at both ends."""

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


class Synthesis(OverlapAdd):
    """Inverse STFT of log-magnitudes and phases."""

    def __init__(self, n_fft: int, hop: int) -> None:
        window = torch.hann_window(n_fft)
        super().__init__(fourier_kernels(window)[1], window, hop, cut=n_fft // 2)
        self.bins = n_fft // 2 + 1

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Transforms the output (B, n_fft + 2, frames) of the last convolution of HiFT to audio (B,
        (frames - 1) * hop).
        """
        magnitude = x[:, : self.bins].exp().clamp(max=_MAX_MAGNITUDE)
        # As in the public code, the phase in radians is the sine of the network's output.
        angle = x[:, self.bins :].sin()
        stft = torch.cat((magnitude * angle.cos(), magnitude * angle.sin()), dim=1)
        return self.add(stft, step)[:, 0]
