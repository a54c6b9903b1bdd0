"""Streaming layers: they run on a whole sequence, or on a stream step by step, with the same result
up to rounding.

A layer declares its state: the last positions of its input, as far as its kernel reaches back. A
layer that reads later positions returns its output late. A step with T positions of input still has
T positions of output (at stride 1), but these belong to earlier positions. All steps of one length
therefore have the same shapes, and nothing is computed twice.

Delays add up along a network, so the state of a layer depends on the layers before it. The
constructor of a complete network calls `place` once, which walks through the layers in the order of
the signal. The method `place` of a layer takes the `Timing` of its input, sets the shape of its
state, and returns its output `Timing`. `layers/combine.py` has combinations that place their parts.
The delay of the last output is the network's delay.

Before the first position of a stream and after its last one, every layer puts zeros, or its own
kind of padding. The step that ends a stream is longer by the network's delay, so that all outputs
are returned. A whole sequence needs neither state nor delay.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.config.settings import DecoderPrecision
from token2wav.config.windows import Windows
from token2wav.layers.packed_linear import PackedCopy, PackedWeight

# On a CPU torch spends most of the time of a convolution of few positions on its weights, which it
# copies into another order in every call. Then a matrix product is faster, on 2 cores (2026-11-24)
# by factors of 2 to 8. The product must copy its inputs, so it is slower for many positions.
#
# The rows of a product have all channels of a position. If the memory of a signal (B, C, T) has
# this order ("channels last"), no product reorders its inputs or outputs, and convolutions of many
# positions are as fast as in the other order. So layers return the order of their input.
_FEW_POSITIONS = 32  # outputs of all streams of a batch
_FEW_POSITIONS_OF_MANY_WEIGHTS = 256
_MANY_WEIGHTS = 1 << 22  # more than fit into the cache of a core
_SHORT_INPUT = 32  # inputs of a stream, for transposed convolutions
#
# On a GPU every convolution with one group, and every transposed one, is a product: cuDNN computed
# float32 convolutions at 4 to 8 TFLOP/s, and cuBLAS large float32 products at 51 (one H200). No GPU
# has measured the products inside a decoder yet, so a benchmark may turn them off here.
products_on_gpu = True
_MOST_WINDOW_BYTES = 256 << 20  # copied for one product; the windows of longer signals are divided


class Activation(Protocol):
    """Elementwise function. It returns the result, and also writes it to `out` if that is given."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


class StateSpec(NamedTuple):
    """State of one layer for one stream. The name is the layer's name in its network."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Timing(NamedTuple):
    """Timing of a signal.

    Attributes:
        delay: positions by which the signal of a step is late.
        extra: positions that the signal of a whole sequence has beyond the positions of its frames,
            for example 1 after an STFT; negative if it has fewer.
    """

    delay: int = 0
    extra: int = 0


ON_TIME = Timing()


class KeyValueSpec(NamedTuple):
    """Keys and values of a group of attention layers for one stream."""

    layers: int
    size: int  # channels of a key, and of a value
    rate: int  # positions per token


class StreamModule(nn.Module):
    """Base of layers, and of modules that consist of layers."""

    def place(self, timing: Timing = ON_TIME) -> Timing:
        """Prepares all layers for streams, from the input timing. Returns the output timing. Layers
        that do not follow each other in the order of the module need a method of their own.
        """
        for layer in self.children():
            if isinstance(layer, StreamModule):
                timing = layer.place(timing)
        return timing


class Streaming(StreamModule):
    """Base of layers that may have a state.

    Attributes:
        input, output: input and output timing; set by `place`.
        state_shape: shape of the state of one stream; empty for a layer without state.
        state_in_place: whether a step changes only a part of the state, where it is stored. A store
            may then pass a list with the state of each stream instead of one tensor (`StateStore`).
    """

    input: Timing
    output: Timing
    state_shape: tuple[int, ...] = ()
    state_in_place: bool = False

    def place(self, timing: Timing = ON_TIME) -> Timing:
        self.input = self.output = timing
        return timing

    @property
    def state_dtype(self) -> torch.dtype:
        """dtype of the state: the dtype of the layer, and at least float32."""
        tensors = [*self.parameters(recurse=False), *self.buffers(recurse=False)]
        return torch.promote_types(tensors[0].dtype, torch.float32) if tensors else torch.float32


class FreezableLayer(nn.Module):
    """Base of layers that compute values from their weights once, when loading ends. Call `freeze`
    before the first use.
    """

    @abstractmethod
    def freeze(self) -> None: ...


class WaveformNetwork(nn.Module):
    """Network from frames to audio: a vocoder, whose frames are mel frames, or a codec decoder,
    whose frames are codes or latents.

    The method `forward` computes the audio (B, 1, frame_samples * T), late by `output_delay`, of
    the next frames (B, input_channels, T) of streams. Codes are -1 in codebooks that a stream does
    not send. A whole sequence has `missing_samples` less.

    Attributes:
        input_channels: mel bands, codebooks, or the size of a latent.
        input_dtype: dtype of the frames: int32 for codes.
        output: audio timing.
        window_frames, frames_past_window: every step that does not end a stream must end
            `frames_past_window` frames after a multiple of `window_frames` frames.
        m_source: harmonic source (`HarmonicSource`); only in networks that take noise.
        packs_linears: whether a decoder may have its linear layers packed. False if other code
            reads their weights.
    """

    input_channels: int
    input_dtype: torch.dtype = torch.float32
    frame_samples: int
    output: Timing
    window_frames: int = 1
    frames_past_window: int = 0
    m_source: Any
    packs_linears: bool = True

    def check_attributes(self) -> None:
        """Raises RuntimeError if the constructor did not set an attribute without a default."""
        for name in ("input_channels", "frame_samples", "output"):
            if not hasattr(self, name):
                raise RuntimeError(
                    f"{type(self).__name__}: the constructor of the network must set `{name}`"
                )

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def output_delay(self) -> int:
        """Samples by which the audio of a step is late, because the network reads later frames."""
        return self.output.delay

    @property
    def missing_samples(self) -> int:
        """Samples at the start of an utterance that the network does not make. The audio of a step
        is late by these samples too.
        """
        return -self.output.extra

    @property
    def lookahead_frames(self) -> int:
        """Frames at the end of an unfinished stream that yield no audio yet, rounded up."""
        return -(-(self.output_delay - self.missing_samples) // self.frame_samples)

    @property
    def first_frames(self) -> int:
        """Least frames with which a stream can start."""
        return self.output_delay // self.frame_samples + 1

    def no_frames(self) -> torch.Tensor:
        """Returns frames (input_channels, 0)."""
        return torch.empty(self.input_channels, 0, dtype=self.input_dtype, device=self.device)

    def freeze(self) -> None:
        """Ends loading: computes results that depend on the weights alone."""
        self.eval().requires_grad_(False)
        for module in self.modules():  # a layer before the layers inside it
            if isinstance(module, FreezableLayer):
                module.freeze()

    def vocode(self, frames: torch.Tensor, noise: Any, *, phase: Any = "exact") -> torch.Tensor:
        """Computes the audio (B, samples) of whole utterances from frames (B, input_channels, T).

        Only a network with a harmonic source uses `noise` and `phase`, see `HiFT`.
        """
        return self(frames)[:, 0]

    def run_step(
        self, frames: torch.Tensor, noise: torch.Tensor, step: StreamStep, decode: Any = None
    ) -> torch.Tensor:
        """Computes the audio (B, samples), late by `output_delay`, of the next frames (B,
        input_channels, T) of streams. `decode` runs the network on another backend; None for torch.
        """
        return (decode or self)(frames, step)[:, 0]


class WindowNetwork(WaveformNetwork):
    """Decoder that reads a whole utterance at once. It has no state, and decodes windows of a
    stream (`stages/windows.py`).
    """

    whole: Windows  # of a whole utterance
    output: Timing = ON_TIME

    @abstractmethod
    def forward(self, frames: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of frames (B, input_channels, T).
        `positions` (B,) int64 are those of the first frame of each window.
        """

    def vocode(self, frames: torch.Tensor, noise: Any, *, phase: Any = "exact") -> torch.Tensor:
        count, samples = frames.shape[2], self.frame_samples
        parts = []
        for window in self.whole.over(0, count, count):
            positions = torch.full((len(frames),), window.position, device=self.device)
            audio = self(frames[:, :, window.first : window.last], positions)[:, 0]
            parts.append(audio[:, : (window.stop - window.start) * samples])
        return torch.cat(parts, dim=1)


@dataclass(frozen=True, eq=False)
class StreamStep:
    """Step of a streaming network: position of its input in the streams, and state of every layer.

    All streams of a batch begin with the step, or all continue, or all end. A layer reads its state
    unless the step is the first. The state after the last step has no use.

    Attributes:
        state: tensor (batch, *state_shape) for each layer that has a state, or a list with a tensor
            for each stream (`Streaming.state_in_place`); None computes whole sequences.
        frames: input frames of the network in this step.
        frames_past_end: trailing zero frames after the end of the streams. They flush the network's
            delay. 0 unless the streams end with this step.
        noise_factor: (batch,) int64, 0 for streams in which noise layers add no noise, else 1. None
            is 1 for all streams.
    """

    state: Mapping[nn.Module, Any] | None = None
    first: bool = False
    frames: int = 1
    frames_past_end: int = 0
    noise_factor: torch.Tensor | None = None

    def with_context(
        self,
        layer: Streaming,
        x: torch.Tensor,
        left: int = 0,
        right: int | None = None,
        mode: str = "constant",
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """Returns the input of a layer with its context: the state of the layer in front, and
        padding at both ends of a stream. The end of the result becomes the new state.

        Args:
            x: (B, C, T) input of the layer, before the activation.
            right: positions of padding at the end of a stream, as `left` at the start; None if the
                layer reads no later positions, so that the values there have no effect.
            activation: writes its result into the returned tensor, which saves a copy.
        """
        if self.state is None:
            x = activation(x) if activation else x
            return _padded(x, left, right or 0, mode) if left or right else x
        if not layer.state_shape:
            return activation(x) if activation else x
        reach = layer.state_shape[-1]
        delay, extra = layer.input
        begin = delay if self.first else 0
        stop = x.shape[2]
        if self.frames_past_end and right is not None:
            stop = stop * (self.frames - self.frames_past_end) // self.frames + delay + extra
        before = reach + begin if self.first else 0
        after = x.shape[2] - stop if self.frames_past_end else 0
        past = None if self.first else self.state[layer]
        in_order = mode == "constant" and is_channels_last(x)
        if (activation or in_order) and not torch.compiler.is_exporting():
            joined = _empty(x, reach + x.shape[2])
            joined[:, :, : reach + begin] = 0 if past is None else past
            if self.frames_past_end:
                joined[:, :, reach + stop :] = 0
            signal, target = x[:, :, begin:stop], joined[:, :, reach + begin : reach + stop]
            if activation:
                activation(signal, target)
            else:
                target.copy_(signal)
            x = joined
        else:
            x = activation(x) if activation else x
            x = x[:, :, begin:stop] if before or after else x
            if past is not None:
                x = torch.cat((past, x), dim=2)
            # Reflect only `left` and `right` positions, because a step may be too short to reflect
            # more. Zeros fill the rest.
            if mode == "reflect":
                edges = left if before else 0, (right or 0) if after else 0
                x = F.pad(x, edges, mode)
                before, after = before - edges[0], after - edges[1]
                mode = "constant"
            if before or after:
                x = F.pad(x, (before, after), mode)
        if not self.frames_past_end:
            self.save_state(layer, x[:, :, x.shape[2] - reach :])
        return x

    def save_state(self, layer: Streaming, value: torch.Tensor) -> None:
        if self.state is not None:
            self.state[layer].copy_(value)


OFFLINE = StreamStep()


def is_channels_last(x: torch.Tensor) -> bool:
    """Returns whether the channels of a position of x (B, C, T) follow each other in memory."""
    return not torch.compiler.is_exporting() and x.shape[1] > 1 and x.stride(1) == 1


def for_cudnn(x: torch.Tensor) -> torch.Tensor:
    """Returns x (B, C, T), on a GPU in the order of its axes: cuDNN has no fast float32 convolution
    of the other order for all sizes.
    """
    return x if x.device.type == "cpu" else x.contiguous()


def _padded(x: torch.Tensor, left: int, right: int, mode: str) -> torch.Tensor:
    """Pads x (B, C, T) at both ends, and keeps its memory order."""
    if mode == "constant" and is_channels_last(x):
        return F.pad(x.transpose(1, 2), (0, 0, left, right)).transpose(1, 2)
    return F.pad(x, (left, right), mode)


def _empty(x: torch.Tensor, length: int) -> torch.Tensor:
    batch, channels, _ = x.shape
    if is_channels_last(x):
        return x.new_empty(batch, length, channels).transpose(1, 2)
    return x.new_empty(batch, channels, length)


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
        return super().forward(
            step.with_context(self, x, self.left, self.right or None, activation=activation)
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
            y = _product(self.packed.of(weight), input, bias, taps, dilation).transpose(1, 2)
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


def _product(
    weight: PackedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    kernel: int,
    dilation: int = 1,
) -> torch.Tensor:
    """Computes the product (B, windows, outputs) of all windows of x (B, C, T)."""
    reach = (kernel - 1) * dilation
    count = x.shape[2] - reach
    window_bytes = len(x) * x.shape[1] * kernel * x.element_size()
    most = max(1, _MOST_WINDOW_BYTES // window_bytes)
    most = count if kernel == 1 else most
    operands = weight.split(x)
    products = []
    for at in range(0, count, most):
        rows = [_windows(part[:, :, at : at + most + reach], kernel, dilation) for part in operands]
        products.append(weight.multiply(rows, bias))
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def _windows(x: torch.Tensor, kernel: int, dilation: int = 1) -> torch.Tensor:
    """Returns all windows (B, windows, kernel * C) of x (B, C, T)."""
    if kernel == 1:
        return x.transpose(1, 2)
    reach = (kernel - 1) * dilation
    windows = x.unfold(2, reach + 1, 1)[..., ::dilation]  # (B, C, windows, kernel)
    return windows.permute(0, 2, 3, 1).flatten(2)


def _windows_weight(weight: torch.Tensor, stride: int, groups: int = 1) -> torch.Tensor:
    """Arranges the weight (inputs, outputs, kernel) of a transposed convolution as that of a
    product with windows of its input: (stride * outputs, window * inputs), or (groups, stride *
    outputs, window * inputs) of a weight (groups * inputs, outputs, kernel).
    """
    parts = F.pad(weight, (0, -weight.shape[2] % stride)).unflatten(2, (-1, stride))
    # The last input of a window gives the first outputs of its kernel.
    parts = parts.flip(2).unflatten(0, (groups, -1)).permute(0, 4, 2, 3, 1).flatten(3).flatten(1, 2)
    return parts[0] if groups == 1 else parts


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

    def with_context(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        return step.with_context(
            self, x, self.pad, self.pad, "replicate" if self.pad else "constant"
        )

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
        self.packed = PackedCopy(partial(_windows_weight, stride=stride, groups=groups))

    @property
    def output(self) -> Timing:
        return self.overlap.output

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:  # type: ignore[override]
        x = self.overlap.with_context(x, step)
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
        in_order, [kernel], [stride] = is_channels_last(x), self.kernel_size, self.stride
        window, count = -(-kernel // stride), x.shape[2]
        if step.state is None:
            x = _padded(x, window - 1, window - 1, "constant")
        weight = self.packed.of(self.weight)
        if self.groups > 1:
            products = self._grouped_product(weight, x, window)
        else:
            bias = None if self.bias is None else self.bias.repeat(stride)
            products = _product(weight, x, bias, window)
        y = products.reshape(len(x), -1, self.out_channels).transpose(1, 2)
        if step.state is None:
            last = (count - 1) * stride + kernel - self.overlap.cut_end
            y = y[:, :, self.overlap.cut : last]
        return y if in_order or _always_multiplies(x, self.packed) else y.contiguous()

    def _grouped_product(self, weight: PackedWeight, x: torch.Tensor, window: int) -> torch.Tensor:
        """Computes the products (B, windows, stride, outputs) of the windows of x (B, inputs, T)
        with the weights of all groups.
        """
        groups, [stride] = self.groups, self.stride
        # (groups, B * windows, window * inputs of a group)
        windows = x.unflatten(1, (groups, -1)).unfold(3, window, 1)
        rows = windows.permute(1, 0, 3, 4, 2).flatten(3).flatten(1, 2)
        bias = None
        if self.bias is not None:
            bias = self.bias.unflatten(0, (groups, -1)).repeat(1, stride)[:, None]
        products = weight.product(rows, bias).unflatten(2, (stride, -1))
        products = products.unflatten(1, (len(x), -1))  # (groups, B, windows, stride, outputs)
        return products.permute(1, 2, 3, 0, 4).flatten(3)


def round_products(network: nn.Module, precision: DecoderPrecision) -> None:
    """Rounds the operands of all convolutions of a network that are products, except of those in
    groups.
    """
    for module in network.modules():
        if isinstance(module, StreamConv | StreamConvTranspose) and module.groups == 1:
            module.packed.precision = precision


class Delay(Streaming):
    """Delay line, which returns a signal `length` positions later, to align it with a later one."""

    def __init__(self, channels: int, length: int = 0) -> None:
        super().__init__()
        self.channels, self.length = channels, length

    def place(self, timing: Timing = ON_TIME) -> Timing:
        self.input, self.output = timing, Timing(timing.delay + self.length, timing.extra)
        self.state_shape = (self.channels, self.length) if self.length else ()
        return self.output

    def align(self, signal: Timing, later: Timing) -> None:
        """Places the delay line such that it makes a signal as late as another one."""
        self.length = later.delay - signal.delay
        self.place(signal)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        return step.with_context(self, x)[:, :, : x.shape[2]] if self.length else x


def state_specs(network: nn.Module) -> dict[nn.Module, StateSpec]:
    """Returns the state specs of a network's layers, in the order of its modules. Raises
    RuntimeError if a layer was not placed, so that its state is unknown.
    """
    layers = {
        name: layer for name, layer in network.named_modules() if isinstance(layer, Streaming)
    }
    if missing := [name for name, layer in layers.items() if not hasattr(layer, "input")]:
        raise RuntimeError(
            f"{type(network).__name__}: layer {missing[0]} was not placed; the constructor of the "
            "network must call `place`"
        )
    return {
        layer: StateSpec(name, layer.state_shape, layer.state_dtype)
        for name, layer in layers.items()
        if layer.state_shape
    }
