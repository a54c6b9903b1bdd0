"""Layers of a network as launches: a convolution is a product over a signal in a channels-last
buffer.

The layers of the network remain the reference: kernel, dilation, stride, delay and state of a
convolution come from its layer. A *signal* is the input of a layer, and its *halo* has the last
rows of the previous piece (`kernels/signals.py`). The halo is long enough for every layer that
reads the signal. So layers that only delay a signal (`Delay`) need no code: a reader of a delayed
signal reads earlier rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.kernels.convolution import Activation, Convolution
from token2wav.kernels.rounding import Precision, rounded_weights
from token2wav.kernels.signals import PieceTensors, Signal, SignalLayout, aligned
from token2wav.layers.convolutions import StreamConvTranspose
from token2wav.layers.streaming import Streaming
from token2wav.networks.hift_layers import FoldableSnake, ResBlock, UpConv


def history(layer: Streaming, delay: int) -> int:
    """Returns the number of rows before a piece that a layer reads.

    The signal of the layer is late by `delay`.
    """
    state_rows = layer.state_shape[-1] if layer.state_shape else 0
    return state_rows + layer.input.delay - delay


def upsampling_weights(up: UpConv | StreamConvTranspose) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights and bias of the convolution that computes an upsampling layer.

    A row of the results of the convolution holds `rate` rows of the results of the layer.

    Returns:
        Weights (rate * outputs, taps, inputs) and bias (rate * outputs,).
    """
    if isinstance(up, UpConv):
        # (outputs * rate, inputs, taps)
        weight = up.phases.unflatten(0, (-1, up.rate)).transpose(0, 1).flatten(0, 1)
        bias, rate = up.bias, up.rate
        weight = weight.transpose(1, 2)
    else:
        rate, taps = up.stride[0], history(up.overlap, up.overlap.input.delay) + 1
        kernel = F.pad(up.weight, (0, rate * taps - up.kernel_size[0]))
        # (inputs, outputs, taps, rate): the first tap belongs to the last input
        kernel = kernel.unflatten(2, (taps, rate)).flip(2)
        weight, bias = kernel.permute(3, 1, 2, 0).flatten(0, 1), up.bias
    if bias is None:
        bias = weight.new_zeros(len(weight) // rate)
    return weight.contiguous(), bias.repeat(rate)


@dataclass(frozen=True, eq=False)
class ResidualChain:
    """Residual blocks of parallel branches."""

    total: SignalLayout  # layout of the input, which is the first residual
    activated: SignalLayout  # layout of the activations of the input
    slopes: torch.Tensor  # (branches, 3, channels) coefficients of the first activations
    convs: list[tuple[Convolution, Convolution]]
    result: SignalLayout

    def __call__(self, batch: PieceTensors, total: Signal, activated: Signal) -> Signal:
        """Returns the results of all branches."""
        x: Signal | None = activated
        residual: Signal | None = total
        for first, second in self.convs:
            assert x is not None
            _, inner = first(batch, x)
            assert inner is not None
            residual, x = second(batch, inner, residual)
        assert residual is not None
        return residual


class ChannelsLastLayers:
    """Declared signals and layers of a network.

    Attributes:
        precision: arithmetic of products of float32. Those of float64 are exact.
        widths: width of the row of a stream's states for each dtype. It grows with each declared
            signal.
    """

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.widths: dict[torch.dtype, int] = {}

    def reserve(self, count: int, dtype: torch.dtype) -> int:
        """Reserves `count` elements of a row of states, and returns the index of the first one."""
        offset = self.widths.get(dtype, 0)
        self.widths[dtype] = offset + aligned(count)
        return offset

    def signal(
        self,
        channels: int,
        rate: int,
        delays: Sequence[int],
        readers: Sequence[Sequence[Any]],
        *,
        extra: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> SignalLayout:
        """Declares a signal, with a halo for its readers.

        Args:
            channels, rate, extra, dtype: see `SignalLayout`.
            readers: groups of layers that read the signal, with one layer for each branch. If the
                signal has one branch, all layers of a group read it.
        """
        reach = [
            history(layer, delays[branch % len(delays)])
            for group in readers
            for branch, layer in enumerate(group)
        ]
        layout = SignalLayout(
            channels, rate, tuple(delays), extra, max(reach, default=0), dtype=dtype
        )
        return replace(layout, state_offset=self.reserve(layout.width, dtype))

    def conv(
        self,
        convs: Sequence[Any],
        x: SignalLayout,
        *,
        waits: Sequence[Any] = (),
        residual: SignalLayout | None = None,
        snakes: Sequence[Any] = (),
        activation: Activation = "none",
        **options: Any,
    ) -> Convolution:
        """Declares parallel convolutions, one for each branch."""
        # (outputs, taps, inputs) of each branch
        kernels = [conv.weight.detach().transpose(1, 2) for conv in convs]
        most = max(kernel.shape[1] for kernel in kernels)
        weights = torch.stack(
            [F.pad(kernel, (0, 0, 0, most - kernel.shape[1])).flatten(1) for kernel in kernels]
        )
        geometry = []
        for branch, conv in enumerate(convs):
            channels, taps = conv.in_channels, conv.kernel_size[0]
            if dense := conv.dilation[0] == 1 and len(convs) == 1:
                # Neighbouring taps are neighbours in the buffer, so they are read as one long tap.
                channels, taps = taps * channels, 1
            first = x.first(history(conv, x.delays[branch % len(x.delays)]))
            before = 0
            if residual:
                before = residual.first(
                    history(waits[branch], residual.delays[branch % len(residual.delays)])
                )
            step = conv.dilation[0] * conv.in_channels
            geometry.append((taps, 0 if dense else step, first, before, conv.output.delay))
        stride = convs[0].stride[0]
        return self.product(
            weights,
            torch.stack([_bias(conv) for conv in convs]),
            geometry,
            channels=channels,
            step=stride * convs[0].in_channels,
            rate=x.rate // stride,
            slopes=_slopes(snakes) if snakes else None,
            activation="snake" if snakes else activation,
            **options,
        )

    def product(
        self,
        weights: torch.Tensor,
        bias: torch.Tensor,
        geometry: Sequence[tuple[int, ...]],
        **options: Any,
    ) -> Convolution:
        """Declares parallel products, with weights (branches, outputs, taps * inputs), bias
        (branches, outputs) and the geometry of each branch; see `Convolution`.
        """
        precision: Precision = "ieee" if weights.dtype == torch.float64 else self.precision
        return Convolution(
            rounded_weights(weights, precision),
            bias,
            torch.tensor(geometry, dtype=torch.int32, device=weights.device),
            precision=precision,
            **options,
        )

    def up(self, up: Any, x: SignalLayout) -> Convolution:
        """Declares an upsampling layer."""
        weight, bias = upsampling_weights(up)
        outputs, taps, inputs = weight.shape
        layer = state_owner(up)
        rate = outputs // up.out_channels
        out = SignalLayout(up.out_channels, x.rate * rate, (up.output.delay,))
        geometry = [(1, 0, x.first(history(layer, x.delays[0])), 0, up.output.delay)]
        return self.product(
            weight.flatten(1)[None],
            bias[None],
            geometry,
            channels=taps * inputs,
            step=inputs,
            rate=x.rate,
            phases=rate,
            raw=out,
        )

    def chain(
        self,
        blocks: Sequence[ResBlock],
        rate: int,
        waits: Sequence[Any],
        extra: int,
    ) -> ResidualChain:
        """Declares residual blocks of parallel branches.

        Args:
            rate: rows per frame.
            waits: delays of the results, one for each branch.
            extra: rows after the last frame.
        """
        firsts = _by_position([block.convs1 for block in blocks])
        seconds = _by_position([block.convs2 for block in blocks])
        delays = _by_position([block.waits for block in blocks])
        snakes1 = _by_position([block.activations1 for block in blocks])
        snakes2 = _by_position([block.activations2 for block in blocks])
        channels = firsts[0][0].in_channels

        def branch_signal(
            branch_delays: Sequence[int], readers: Sequence[Sequence[Any]]
        ) -> SignalLayout:
            return self.signal(channels, rate, branch_delays, readers, extra=extra)

        begin = [conv.input.delay for conv in firsts[0]]
        first_total = residual = branch_signal(begin[:1], [delays[0]])
        x = first_x = branch_signal(begin, [firsts[0]])
        convs = []
        for index in range(len(firsts)):
            inner_delays = [conv.output.delay for conv in firsts[index]]
            inner = branch_signal(inner_delays, [seconds[index]])
            first = self.conv(firsts[index], x, snakes=snakes2[index], out=inner)
            result_delays = [conv.output.delay for conv in seconds[index]]
            last = index == len(firsts) - 1
            following = None if last else branch_signal(result_delays, [firsts[index + 1]])
            result = branch_signal(result_delays, [list(waits)] if last else [delays[index + 1]])
            second = self.conv(
                seconds[index],
                inner,
                waits=delays[index],
                residual=residual,
                snakes=() if last else snakes1[index + 1],
                raw=result,
                out=following,
            )
            convs.append((first, second))
            residual = result
            if following:
                x = following
        return ResidualChain(first_total, first_x, _slopes(snakes1[0]), convs, residual)


def state_owner(up: UpConv | StreamConvTranspose) -> Streaming:
    """Returns the layer that declares the state of an upsampling layer."""
    return up if isinstance(up, UpConv) else up.overlap


def _by_position(branches: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns the layers of parallel branches, grouped by their position in the branch."""
    return list(zip(*branches, strict=True))


def _bias(conv: nn.Conv1d) -> torch.Tensor:
    return conv.weight.new_zeros(len(conv.weight)) if conv.bias is None else conv.bias.detach()


def _slopes(snakes: Sequence[FoldableSnake]) -> torch.Tensor:
    """Returns the coefficients (branches, 3, channels) of parallel Snake activations."""
    return torch.stack([snake.coefficients() for snake in snakes]).contiguous()
