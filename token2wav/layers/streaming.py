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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn


class Activation(Protocol):
    """Elementwise function. It returns the result, and also writes it to `out` if that is given. If
    a kernel can compute it, it has an attribute `curve`.
    """

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


class Curve(NamedTuple):
    """Activation as a kernel computes it: Snake for the first channels, and LeakyReLU or ELU for
    the others. By default no channel has an activation.

    Attributes:
        frequency, inverse: contiguous coefficients of Snake, one for each of its channels.
        slope: slope of LeakyReLU for the other channels.
        elu: whether the other channels have ELU.
    """

    frequency: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    slope: float | None = None
    elu: bool = False


class KernelContext(NamedTuple):
    """Context of the input x of a layer, as a kernel reads it.

    Attributes:
        before, after: positions of context before and after x. They hold the state, or zeros.
        state: (B, C, before) state of the layer, which a kernel replaces by the last `before`
            positions of the input with its context. None to compute whole sequences.
        span: positions of x that belong to the streams (`StreamStep.span`); None for all. The
            kernel reads zeros at the other positions.
        first, last: whether streams begin with this step, or end with it.
    """

    before: int = 0
    after: int = 0
    state: torch.Tensor | None = None
    span: tuple[int, int] | None = None
    first: bool = True
    last: bool = True

    def of(self, streams: slice) -> KernelContext:
        """Returns the context of some streams of the batch."""
        return self if self.state is None else self._replace(state=self.state[streams])


class ContextKernels(NamedTuple):
    """Functions of kernels/context.py with these names."""

    with_context: Callable[..., torch.Tensor]
    windows: Callable[..., torch.Tensor]
    depthwise: Callable[..., torch.Tensor]


class StateSpec(NamedTuple):
    """State of one layer for one stream. The name is the layer's name in its network."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class StatesInPlace(NamedTuple):
    """States of one layer where they are stored, for its `Streaming.state_kernel`.

    Attributes:
        scratch: (*shape) state in the scratch slot.
        offsets: (batch,) int64 distances from it to the state of each stream, in elements.
    """

    scratch: torch.Tensor
    offsets: torch.Tensor


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
        state_kernel: function that computes a step on `StatesInPlace`: `window_attention` of
            kernels/window_attention.py; None for operators of torch.
        context_kernels: functions that compute, in one launch, the input of the layer with its
            context, or the output of the layer; None for operators of torch.
    """

    state_kernel: Callable[..., torch.Tensor] | None = None
    context_kernels: ContextKernels | None = None
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


@dataclass(frozen=True, eq=False)
class StreamStep:
    """Step of a streaming network: position of its input in the streams, and state of every layer.

    All streams of a batch begin with the step, or all continue, or all end. A layer reads its state
    unless the step is the first. The state after the last step has no use.

    Attributes:
        state: tensor (batch, *state_shape) for each layer that has a state, or a list with a tensor
            for each stream or `StatesInPlace` (`Streaming.state_in_place`); None computes whole
            sequences.
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
        channels_last: bool | None = None,
    ) -> torch.Tensor:
        """Returns the input of a layer with its context: the state of the layer in front, and
        padding at both ends of a stream. The end of the result becomes the new state.

        Args:
            x: (B, C, T) input of the layer, before the activation.
            right: positions of padding at the end of a stream, as `left` at the start; None if the
                layer reads no later positions, so that the values there have no effect.
            activation: writes its result into the returned tensor, which saves a copy.
            channels_last: memory order of the result of a kernel; None for that of x.
        """
        if layer.context_kernels and mode == "constant" and x.dtype == torch.float32:
            return self._on_kernel(layer, x, left, right, activation, channels_last)
        if self.state is None:
            x = activation(x) if activation else x
            return padded(x, left, right or 0, mode) if left or right else x
        if not layer.state_shape:
            return activation(x) if activation else x
        reach = layer.state_shape[-1]
        begin, stop = self.span(layer, x.shape[2])
        if right is None:
            stop = x.shape[2]
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

    def _on_kernel(
        self,
        layer: Streaming,
        x: torch.Tensor,
        left: int,
        right: int | None,
        activation: Activation | None,
        channels_last: bool | None,
    ) -> torch.Tensor:
        x, curve = curve_of(x, activation)
        context = self.kernel_context(layer, x.shape[2], left, right)
        if curve is None and not context.before + context.after:
            return x
        assert layer.context_kernels is not None
        return layer.context_kernels.with_context(x, context, curve, channels_last=channels_last)

    def kernel_context(
        self, layer: Streaming, length: int, left: int, right: int | None
    ) -> KernelContext:
        """Returns the context of the input of a layer, which has the length of this step. For the
        other arguments see `with_context`.
        """
        if self.state is None:
            return KernelContext(left, right or 0)
        if not layer.state_shape:
            return KernelContext()
        begin, stop = self.span(layer, length)
        return KernelContext(
            layer.state_shape[-1],
            state=self.state[layer],
            span=(begin, length if right is None else stop),
            first=self.first,
            last=self.frames_past_end > 0,
        )

    def span(self, layer: Streaming, length: int) -> tuple[int, int]:
        """Returns the part of the input of a layer, of the length of this step, that belongs to the
        streams: the position at which it starts, and the position after it.
        """
        delay, extra = layer.input
        stop = length
        if self.frames_past_end:
            stop = length * (self.frames - self.frames_past_end) // self.frames + delay + extra
        return delay if self.first else 0, stop

    def save_state(self, layer: Streaming, value: torch.Tensor) -> None:
        if self.state is not None:
            self.state[layer].copy_(value)


OFFLINE = StreamStep()


def curve_of(x: torch.Tensor, activation: Activation | None) -> tuple[torch.Tensor, Curve | None]:
    """Returns x and the curve that a kernel applies to it. If no kernel computes the activation,
    returns the result of the activation, and None.
    """
    curve: Curve | None = getattr(activation, "curve", None)
    return (activation(x) if activation and curve is None else x), curve


def is_channels_last(x: torch.Tensor) -> bool:
    """Returns whether the channels of a position of x (B, C, T) follow each other in memory."""
    return not torch.compiler.is_exporting() and x.shape[1] > 1 and x.stride(1) == 1


def padded(x: torch.Tensor, left: int, right: int, mode: str) -> torch.Tensor:
    """Pads x (B, C, T) at both ends, and keeps its memory order."""
    if mode == "constant" and is_channels_last(x):
        return F.pad(x.transpose(1, 2), (0, 0, left, right)).transpose(1, 2)
    return F.pad(x, (left, right), mode)


def _empty(x: torch.Tensor, length: int) -> torch.Tensor:
    batch, channels, _ = x.shape
    if is_channels_last(x):
        return x.new_empty(batch, length, channels).transpose(1, 2)
    return x.new_empty(batch, channels, length)


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
