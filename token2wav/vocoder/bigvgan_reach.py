"""How far BigVGAN sees: which mel frames can influence the samples of one frame. Worked out from the layers alone.

Its convolutions look to both sides, so it has a look-ahead as well as a past; both are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from token2wav.bigvgan_config import EDGE_KERNEL, BigVGANConfig
from token2wav.vocoder.activations import FILTER_TAPS, RATIO


@dataclass(frozen=True)
class Reach:
    """Mel frames beside a frame's own that its samples depend on.

    Attributes:
        left: frames before it.
        right: frames after it: the look-ahead.
    """

    left: int
    right: int


@dataclass(frozen=True)
class _Span:
    """Positions `first` to `last` of a layer's output; the methods give those of its input that they depend on.

    Layers are padded as BigVGAN pads them: as much on the left as on the right, or one less.
    """

    first: int
    last: int

    def before_conv(self, kernel: int, *, dilation: int = 1, stride: int = 1) -> _Span:
        left, all_taps = (kernel - 1) // 2 * dilation, (kernel - 1) * dilation
        return _Span(self.first * stride - left, self.last * stride + all_taps - left)

    def before_transposed_conv(self, kernel: int, stride: int) -> _Span:
        """Output o takes from input i where o + cut = i * stride + tap, and 0 <= tap < kernel."""
        cut = (kernel - stride) // 2
        return _Span(-((kernel - 1 - self.first - cut) // stride), (self.last + cut) // stride)

    def before_activation(self) -> _Span:
        return self.before_conv(FILTER_TAPS, stride=RATIO).before_transposed_conv(FILTER_TAPS, RATIO)

    def before_block(self, kernel: int, dilations: tuple[int, ...], *, paired: bool) -> _Span:
        span = self
        for dilation in reversed(dilations):
            if paired:
                span = span.before_conv(kernel).before_activation()
            span = span.before_conv(kernel, dilation=dilation).before_activation()
        return span


def reach_frames(config: BigVGANConfig) -> Reach:
    """The reach of a vocoder, followed from the samples of one frame back to the mel."""
    span = _Span(0, config.hop_size - 1).before_conv(EDGE_KERNEL).before_activation()
    blocks = list(zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True))
    for kernel, rate in reversed(list(zip(config.upsample_kernel_sizes, config.upsample_rates, strict=True))):
        before = [span.before_block(*block, paired=config.resblock == "1") for block in blocks]
        span = _Span(min(each.first for each in before), max(each.last for each in before))
        span = span.before_transposed_conv(kernel, rate)
    span = span.before_conv(EDGE_KERNEL)
    return Reach(left=-span.first, right=span.last)
