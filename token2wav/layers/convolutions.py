"""Convolutions over streams, also transposed ones, as layers of `layers/streaming.py`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.config.settings import DecoderPrecision
from token2wav.layers.packed_linear import PackedCopy, PackedWeight
from token2wav.layers.streaming import (
    OFFLINE,
    ON_TIME,
    Activation,
    KernelContext,
    Streaming,
    StreamModule,
    StreamStep,
    Timing,
    curve_of,
    is_channels_last,
    padded,
)

# On a CPU, torch copies the weights of a convolution into another order in every call. With few
# positions this copy takes most of the time, and a matrix product is 2 to 8 times as fast (2 cores,
# 2026-11-24). A product copies its inputs instead, so it is slower with many positions.
#
# The rows of a product have all channels of a position. If the memory of a signal (B, C, T) has
# this order ("channels last"), no product reorders its inputs or outputs, and convolutions of many
# positions are as fast as in the other order. So layers return the order of their input.
_FEW_POSITIONS = 32  # outputs of all streams of a batch
_FEW_POSITIONS_OF_MANY_WEIGHTS = 256
_MANY_WEIGHTS = 1 << 22  # more than fit into the cache of a core
_SHORT_INPUT = 32  # inputs of a stream, for transposed convolutions
#
# On a GPU, every transposed convolution and every convolution with one group and stride 1 is a
# product. cuDNN computed float32 convolutions at 4 to 8 TFLOP/s, and cuBLAS large float32 products
# at 51 (one H200). No GPU has measured the products inside a decoder yet, so a benchmark may turn
# them off here.
products_on_gpu = True
_MOST_WINDOW_BYTES = 512 << 20  # written for one product; longer signals need several products


def for_cudnn(x: torch.Tensor) -> torch.Tensor:
    """Returns x (B, C, T), on a GPU in the order of its axes: cuDNN has no fast float32 convolution
    of the other order for all sizes.
    """
    return x if x.device.type == "cpu" else x.contiguous()


class Window(NamedTuple):
    """Input positions that an output of a layer depends on.

    Attributes:
        left, right: positions of padding at the start and at the end of a stream.
        span: positions from the first to the last one that an output depends on.
        stride: positions from the window of an output to the window of the next one.
    """

    left: int
    right: int
    span: int
    stride: int = 1

    def output(self, timing: Timing) -> Timing:
        delay = -((self.left - timing.delay - self.span) // self.stride + 1)
        extra = (timing.extra + self.left + self.right - self.span) // self.stride + 1
        return Timing(delay, extra)

    def kept(self, timing: Timing) -> int:
        """Returns the number of input positions before a step on which its outputs depend."""
        return self.left - timing.delay + self.stride * self.output(timing).delay

    def latest_input(self, delay: int) -> int:
        """Returns the largest delay of the input that gives a delay of the output."""
        return self.left - self.span + self.stride * (delay + 1)


class StreamConv(nn.Conv1d, Streaming):
    """Convolution over a stream. For arguments see `nn.Conv1d`; `left` and `right` are the numbers
    of zeros at the start and at the end of a stream.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        left: int = 0,
        right: int = 0,
        dilation: int = 1,
        stride: int = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__(
            inputs, outputs, kernel, stride=stride, dilation=dilation, groups=groups, bias=bias
        )
        self.left, self.right = left, right
        self.packed = PackedCopy(lambda weight: weight.transpose(1, 2).flatten(1))

    def place(self, timing: Timing = ON_TIME) -> Timing:
        self.input, self.output = timing, self.window.output(timing)
        reach = self.window.kept(timing)
        self.state_shape = (self.in_channels, reach) if reach else ()
        return self.output

    @property
    def window(self) -> Window:
        span = (self.kernel_size[0] - 1) * self.dilation[0] + 1
        return Window(self.left, self.right, span, self.stride[0])

    def forward(
        self, x: torch.Tensor, step: StreamStep = OFFLINE, activation: Activation | None = None
    ) -> torch.Tensor:
        right, [taps], [dilation] = self.right or None, self.kernel_size, self.dilation
        is_product = self.groups == 1 and self.stride[0] == 1
        depthwise = self.groups == self.in_channels == self.out_channels and self.stride[0] == 1
        if depthwise and self.context_kernels and _multiplies(x, self.weight):
            x, curve = curve_of(x, activation)
            context = step.kernel_context(self, x.shape[2], self.left, right)
            kernel = self.context_kernels.depthwise
            return kernel(x, context, curve, self.weight, self.bias, dilation)
        if is_product and _has_window_kernel(self, x, self.weight, taps):
            context = step.kernel_context(self, x.shape[2], self.left, right)
            weight = self.packed.of(self.weight, self.bias)
            y = _kernel_product(self, x, context, activation, weight, taps, dilation)
            return y.transpose(1, 2)
        # A product has channels last; cuDNN convolves groups and strides in the order of the axes.
        order = products_on_gpu and is_product
        return super().forward(
            step.with_context(self, x, self.left, right, activation=activation, channels_last=order)
        )

    def _conv_forward(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if input.dtype != weight.dtype:
            return super()._conv_forward(input.to(weight.dtype), weight, bias).to(input.dtype)
        if self.groups > 1 or self.stride[0] > 1 or not _multiplies(input, weight):
            return super()._conv_forward(for_cudnn(input), weight, bias)
        in_order, always = is_channels_last(input), _always_multiplies(input, self.packed)
        if always or self._is_short(input, in_order):
            [taps], [dilation] = self.kernel_size, self.dilation
            y = _product(self.packed.of(weight, bias), input, taps, dilation).transpose(1, 2)
            return y if in_order or always else y.contiguous()
        if in_order:  # torch has this order for two dimensions only
            image, kernel = input[:, :, None], weight[:, :, None]
            return F.conv2d(image, kernel, bias, dilation=(1, self.dilation[0]))[:, :, 0]
        return super()._conv_forward(input, weight, bias)

    def _is_short(self, x: torch.Tensor, in_order: bool) -> bool:
        """Returns whether a matrix product is faster than torch's convolution of x (B, C, T)."""
        [kernel], [dilation] = self.kernel_size, self.dilation
        if in_order and kernel == 1:
            return True
        many = in_order or self.weight.numel() >= _MANY_WEIGHTS
        positions = len(x) * (x.shape[2] - (kernel - 1) * dilation)
        return positions <= (_FEW_POSITIONS_OF_MANY_WEIGHTS if many else _FEW_POSITIONS)


def _product(weight: PackedWeight, x: torch.Tensor, kernel: int, dilation: int = 1) -> torch.Tensor:
    """Computes the product (B, windows, outputs) of all windows of x (B, C, T)."""
    reach = (kernel - 1) * dilation
    count = x.shape[2] - reach
    window_bytes = len(x) * x.shape[1] * kernel * x.element_size()
    most = max(1, _MOST_WINDOW_BYTES // window_bytes)
    most = count if kernel == 1 else most
    products = []
    for at in range(0, count, most):
        rows = _windows(x[:, :, at : at + most + reach], kernel, dilation)
        products.append(weight.product(rows))
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def _has_window_kernel(
    layer: Streaming, x: torch.Tensor, weight: torch.Tensor, kernel: int
) -> bool:
    """Returns whether a kernel writes the windows of x (B, C, T) for a product."""
    if layer.context_kernels is None or not _multiplies(x, weight):
        return False
    return _streams_at_once(x, kernel) > 0


def _streams_at_once(x: torch.Tensor, kernel: int) -> int:
    """Returns how many streams of x (B, C, T) have windows of at most `_MOST_WINDOW_BYTES` in
    total. With `float16x3` the windows take 1.5 times as much.
    """
    return _MOST_WINDOW_BYTES // max(1, x[0].numel() * kernel * x.element_size())


def _kernel_product(
    layer: Streaming,
    x: torch.Tensor,
    context: KernelContext,
    activation: Activation | None,
    weight: PackedWeight,
    kernel: int,
    dilation: int = 1,
) -> torch.Tensor:
    """Computes the product (B, windows, outputs) of a weight and all windows of x (B, C, T), after
    the activation of x and with its context. A kernel writes the windows.
    """
    assert layer.context_kernels is not None
    x, curve = curve_of(x, activation)
    most = _streams_at_once(x, kernel)
    products = []
    for at in range(0, len(x), most):
        streams = slice(at, at + most)
        rows = layer.context_kernels.windows(
            x[streams], context.of(streams), curve, kernel, dilation, weight.precision
        )
        products.append(weight.multiply(rows))
        del rows  # before the next ones are written
    return products[0] if len(products) == 1 else torch.cat(products)


def _windows(x: torch.Tensor, kernel: int, dilation: int = 1) -> torch.Tensor:
    """Returns all windows (B, windows, kernel * C) of x (B, C, T)."""
    if kernel == 1:
        return x.transpose(1, 2)
    reach = (kernel - 1) * dilation
    windows = x.unfold(2, reach + 1, 1)[..., ::dilation]  # (B, C, windows, kernel)
    rows = windows.permute(0, 2, 3, 1).flatten(2)
    # Rows may overlap in memory. cuBLAS would copy them, and add the bias in a launch of its own.
    return rows if x.device.type == "cpu" else rows.contiguous()


def _windows_weight(weight: torch.Tensor, stride: int, groups: int = 1) -> torch.Tensor:
    """Arranges the weight (inputs, outputs, kernel) of a transposed convolution as that of a
    product with windows of its input: (stride * outputs, window * inputs), or (groups, stride *
    outputs, window * inputs) of a weight (groups * inputs, outputs, kernel).
    """
    parts = F.pad(weight, (0, -weight.shape[2] % stride)).unflatten(2, (-1, stride))
    # The last input of a window gives the first outputs of its kernel.
    parts = parts.flip(2).unflatten(0, (groups, -1)).permute(0, 4, 2, 3, 1).flatten(3).flatten(1, 2)
    return parts[0] if groups == 1 else parts


def _windows_bias(bias: torch.Tensor, stride: int, groups: int = 1) -> torch.Tensor:
    """Repeats the bias (groups * outputs,) of a transposed convolution for the outputs of a window:
    (stride * outputs,), or (groups, 1, stride * outputs).
    """
    repeated = bias.unflatten(0, (groups, -1)).repeat(1, stride)
    return repeated[0] if groups == 1 else repeated[:, None]


def _always_multiplies(x: torch.Tensor, weight: PackedCopy) -> bool:
    """Returns whether a product is used for any number of positions: torch's convolution is slow on
    a GPU, and does not round its operands.
    """
    return x.device.type != "cpu" or weight.precision != "float32"


def _multiplies(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether a convolution of x may be a product with a packed weight."""
    return (
        (products_on_gpu or x.device.type == "cpu")
        and x.dtype == weight.dtype == torch.float32
        and not weight.requires_grad  # the product has no gradient
        and not (torch.is_grad_enabled() and x.requires_grad)
        and not torch.compiler.is_exporting()
    )


def causal_conv(
    inputs: int, outputs: int, kernel: int, *, dilation: int = 1, **options: Any
) -> StreamConv:
    """Makes a convolution that reads no later positions. `options` are those of `StreamConv`."""
    left = (kernel - 1) * dilation
    return StreamConv(inputs, outputs, kernel, left=left, dilation=dilation, **options)


def lookahead_conv(inputs: int, outputs: int, kernel: int) -> StreamConv:
    return StreamConv(inputs, outputs, kernel, right=kernel - 1)


def centred_conv(
    inputs: int, outputs: int, kernel: int, *, dilation: int = 1, **options: Any
) -> StreamConv:
    """Makes a convolution with an odd kernel that reads equally far to both sides. `options` are
    those of `StreamConv`.
    """
    reach = (kernel - 1) * dilation // 2
    return StreamConv(
        inputs, outputs, kernel, left=reach, right=reach, dilation=dilation, **options
    )


class Overlap(Streaming):
    """State of a transposed convolution, in which the outputs of several inputs overlap.

    Args:
        cut: outputs that are dropped at the start of a stream.
        cut_end: outputs that are dropped at the end of a stream; None for `cut`.
        pad: repetitions of the edges of the input before the convolution.
    """

    def __init__(
        self,
        channels: int,
        kernel: int,
        stride: int,
        *,
        cut: int,
        cut_end: int | None = None,
        pad: int = 0,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.cut, self.pad = kernel, stride, cut, pad
        self.cut_end = cut if cut_end is None else cut_end
        if reach := (kernel - 1) // stride:
            self.state_shape = (channels, reach)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        inputs = timing.extra + 2 * self.pad  # in addition to those of the frames
        self.input = timing
        self.output = Timing(
            self.stride * (timing.delay - self.pad) + self.cut,
            self.stride * (inputs - 1) + self.kernel - self.cut - self.cut_end,
        )
        return self.output

    def with_context(
        self,
        x: torch.Tensor,
        step: StreamStep,
        activation: Activation | None = None,
        *,
        channels_last: bool,
    ) -> torch.Tensor:
        if activation and not self.context_kernels:
            x, activation = activation(x), None
        mode = "replicate" if self.pad else "constant"
        return step.with_context(self, x, self.pad, self.pad, mode, activation, channels_last)

    def complete_outputs(self, y: torch.Tensor, inputs: int, step: StreamStep) -> torch.Tensor:
        """Selects the outputs y (B, C, T) of the convolution that no later input changes. `inputs`
        is the length of the input that `with_context` returned.
        """
        if step.state is None:
            return y[:, :, self.cut : y.shape[2] - self.cut_end]
        reach = self.state_shape[-1] if self.state_shape else 0
        return y[:, :, self.stride * reach : self.stride * inputs]


class StreamConvTranspose(nn.ConvTranspose1d, StreamModule):
    """Transposed convolution over a stream that makes `stride` outputs of every input.

    Args:
        inputs, outputs, kernel, stride, groups, bias: as for `nn.ConvTranspose1d`. The kernel is as
            long as the stride, or longer; by an even number if `cut` is "halves".
        cut: selects the outputs of a whole sequence to drop, because it has `kernel - stride` too
            many. "halves": one half at each end. "end": all at the end, so that an output depends
            on no later input. "both": as "end", and as many at the start; the result is then
            shorter than `stride` outputs of every input. A pair: outputs to drop at the start, and
            at the end.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int,
        *,
        cut: Literal["halves", "end", "both"] | tuple[int, int] = "halves",
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=bias)
        surplus = kernel - stride
        if isinstance(cut, tuple):
            start, end = cut
        else:
            start = {"halves": surplus // 2, "end": 0, "both": surplus}[cut]
            end = surplus - start if cut == "halves" else surplus
        self.overlap = Overlap(inputs, kernel, stride, cut=start, cut_end=end)
        self._window = -(-kernel // stride)  # inputs of `stride` outputs
        self.packed = PackedCopy(
            partial(_windows_weight, stride=stride, groups=groups),
            partial(_windows_bias, stride=stride, groups=groups),
        )

    @property
    def output(self) -> Timing:
        return self.overlap.output

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, step: StreamStep = OFFLINE, activation: Activation | None = None
    ) -> torch.Tensor:
        length, ends = x.shape[2], self._window - 1
        if self.groups == 1 and _has_window_kernel(self.overlap, x, self.weight, self._window):
            context = step.kernel_context(self.overlap, length, ends, ends)
            weight = self.packed.of(self.weight, self.bias)
            products = _kernel_product(self.overlap, x, context, activation, weight, self._window)
            return self._outputs(products, length, step)
        x = self.overlap.with_context(x, step, activation, channels_last=products_on_gpu)
        if self._is_product(x):
            return self._as_product(x, step)
        y = F.conv_transpose1d(
            for_cudnn(x).to(self.weight.dtype),
            self.weight,
            self.bias,
            self.stride,
            groups=self.groups,
        ).to(x.dtype)
        return self.overlap.complete_outputs(y, x.shape[2], step)

    def _is_product(self, x: torch.Tensor) -> bool:
        if not _multiplies(x, self.weight):
            return False
        if _always_multiplies(x, self.packed):
            return True
        return self.groups == 1 and (is_channels_last(x) or x.shape[2] <= _SHORT_INPUT)

    def _as_product(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Computes all complete outputs from x (B, inputs, T) as a product of windows. A window has
        one input for each stride of the kernel, and gives `stride` outputs.
        """
        in_order, ends, length = is_channels_last(x), self._window - 1, x.shape[2]
        if step.state is None:
            x = padded(x, ends, ends, "constant")
        weight = self.packed.of(self.weight, self.bias)
        if self.groups > 1:
            products = self._grouped_product(weight, x)
        else:
            products = _product(weight, x, self._window)
        y = self._outputs(products, length, step)
        return y if in_order or _always_multiplies(x, self.packed) else y.contiguous()

    def _outputs(self, products: torch.Tensor, inputs: int, step: StreamStep) -> torch.Tensor:
        """Returns the complete outputs (B, outputs, T) in the products (B, windows, ...)."""
        y = products.reshape(len(products), -1, self.out_channels).transpose(1, 2)
        if step.state is None:
            last = (inputs - 1) * self.stride[0] + self.kernel_size[0] - self.overlap.cut_end
            y = y[:, :, self.overlap.cut : last]
        return y

    def _grouped_product(self, weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
        """Computes the products (B, windows, stride, outputs) of the windows of x (B, inputs, T)
        with the weights of all groups.
        """
        groups, [stride] = self.groups, self.stride
        # (groups, B * windows, window * inputs of a group)
        windows = x.unflatten(1, (groups, -1)).unfold(3, self._window, 1)
        rows = windows.permute(1, 0, 3, 4, 2).flatten(3).flatten(1, 2)
        products = weight.product(rows).unflatten(2, (stride, -1))
        products = products.unflatten(1, (len(x), -1))  # (groups, B, windows, stride, outputs)
        return products.permute(1, 2, 3, 0, 4).flatten(3)


def round_products(network: nn.Module, precision: DecoderPrecision) -> None:
    """Rounds the operands of all convolutions of a network that are products, except of those in
    groups.
    """
    for module in network.modules():
        if isinstance(module, StreamConv | StreamConvTranspose) and module.groups == 1:
            module.packed.precision = precision
