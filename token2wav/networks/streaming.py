"""Layers that run on a whole sequence or on its pieces, one after the other, with the same result up to rounding.

A layer declares what it must keep of a stream between two pieces: the last positions of its input, as far as its kernel
reaches back. What looks to the right gives its output late, and every layer adds its own delay to that of its input: of
every piece, the outputs are those of as many positions earlier. So all pieces of a length have the same shapes, and
nothing is computed twice. What such a piece has in front of the first position of a stream, and behind the last one, is
nothing: every layer replaces it by zeros, or by what its padding says, before it looks. At the end of a stream a piece
is longer by the delay of the network, so that all comes out. On a whole sequence there is neither state nor delay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn


class Activation(Protocol):
    """Function of every number of a tensor; it returns the result, and writes it to `out` where that is given."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


class StateSpec(NamedTuple):
    """Tensor that a layer keeps for every stream, under the layer's name in its network."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Streaming(nn.Module):
    """Base of layers that may keep something."""

    keeps: tuple[int, ...] = ()  # shape of the tensor for one stream; empty for a layer that keeps nothing
    delay: int = 0  # positions that the input of a piece is late
    more: int = 0  # positions that the input of a whole sequence has beside those that its frames make

    @property
    def delayed(self) -> int:
        """Positions, in its own rate, that the output is late."""
        return self.delay

    @property
    def state_dtype(self) -> torch.dtype:
        """Type of what is kept: that of the layer's own numbers, but not half of float32."""
        own = [*self.parameters(recurse=False), *self.buffers(recurse=False)]
        return torch.promote_types(own[0].dtype, torch.float32) if own else torch.float32


class VocoderNetwork(nn.Module):
    """Network from mel to audio, as the stages of vocoders see it."""

    bands: int
    frame_samples: int
    delay: int  # samples by which the audio of a piece is late: it takes so much mel to its right
    m_source: Any  # makes an excitation of noise (`HarmonicSource`), in those that are given any

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def lookahead_frames(self) -> int:
        """Mel frames, rounded up, at the end of an unfinished mel that yield no audio yet."""
        return -(-self.delay // self.frame_samples)

    def freeze(self) -> None:
        """Ends loading: weights change no more, and what follows from them alone is computed once."""
        self.eval().requires_grad_(False)

    def vocode(self, mel: torch.Tensor, noise: Any, *, phase: Any = "exact") -> torch.Tensor:
        """Audio (B, samples) of mel (B, bands, T) of whole utterances; see `HiFT` for noise and phase of a source."""
        return self(mel)[:, 0]

    def in_pieces(self, mel: torch.Tensor, noise: torch.Tensor, piece: Piece, decode: Any = None) -> torch.Tensor:
        """Audio (B, samples), `delay` late, of a piece of mel (B, bands, T); `decode` runs it on another backend."""
        return (decode or self)(mel, piece)[:, 0]


@dataclass(frozen=True, eq=False)
class Piece:
    """Place of a piece in its streams, which are all at the same, and what layers kept of what came before it.

    The state is (B, *shape) of every layer that keeps something: read unless `first`, overwritten unless streams end;
    None for whole sequences.
    """

    state: Mapping[Streaming, torch.Tensor] | None = None
    first: bool = False  # the streams start with it
    frames: int = 1  # of the network's input in it
    beyond: int = 0  # of them lie behind the end of the streams: where they end, what the network is late

    def extended(
        self,
        layer: Streaming,
        x: torch.Tensor,
        left: int = 0,
        right: int | None = None,
        mode: str = "constant",
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """Input of a layer with what comes before it, and with padding in place of what does not exist.

        Args:
            layer: that keeps the end of what is returned.
            x: (B, C, T) its input, before the activation.
            left, right: positions to pad at the start and at the end of a stream; None where no output looks to the
                right, so that it does not matter what is there.
            mode: of the padding, see `torch.nn.functional.pad`.
            activation: of x; it writes where its result is needed, which spares a copy of everything.
        """
        if self.state is None:
            x = activation(x) if activation else x
            return F.pad(x, (left, right or 0), mode) if left or right else x
        if not layer.keeps:
            return activation(x) if activation else x
        kept = layer.keeps[-1]
        begin = layer.delay if self.first else 0
        stop = x.shape[2]
        if self.beyond and right is not None:
            stop = stop * (self.frames - self.beyond) // self.frames + layer.delay + layer.more
        before, after = kept + begin if self.first else 0, x.shape[2] - stop if self.beyond else 0
        past = None if self.first else self.state[layer]
        if activation and not torch.compiler.is_exporting():
            joined = x.new_empty(*x.shape[:2], kept + x.shape[2])
            joined[:, :, : kept + begin] = 0 if past is None else past
            if self.beyond:
                joined[:, :, kept + stop :] = 0
            activation(x[:, :, begin:stop], joined[:, :, kept + begin : kept + stop])
            x = joined
        else:
            x = activation(x) if activation else x
            x = x[:, :, begin:stop] if before or after else x
            if past is not None:
                x = torch.cat((past, x), dim=2)
            if mode == "reflect":  # no more than is needed, which may be all there is
                edges = left if before else 0, (right or 0) if after else 0
                x = F.pad(x, edges, mode)
                before, after = before - edges[0], after - edges[1]
                mode = "constant"
            if before or after:
                x = F.pad(x, (before, after), mode)
        if not self.beyond:
            self.keep(layer, x[:, :, x.shape[2] - kept :])
        return x

    def keep(self, layer: Streaming, value: torch.Tensor) -> None:
        """Replaces what a layer keeps."""
        if self.state is not None:
            self.state[layer].copy_(value)


WHOLE = Piece()


class StreamConv(nn.Conv1d, Streaming):
    """Convolution over a stream.

    Args:
        inputs, outputs, kernel, dilation, stride, bias: as for any convolution.
        left, right: zeros at the start and at the end of a stream.
        delay, more: of the input, see `Streaming`.
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
        delay: int = 0,
        more: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, dilation=dilation, bias=bias)
        self.left, self.right, self.delay, self.more = left, right, delay, more
        if kept := left - delay + stride * self.delayed:
            self.keeps = (inputs, kept)

    @property
    def delayed(self) -> int:
        reach = (self.kernel_size[0] - 1) * self.dilation[0]
        return strided_delay(self.left - self.delay, reach + 1, self.stride[0])

    def forward(self, x: torch.Tensor, piece: Piece = WHOLE, activation: Activation | None = None) -> torch.Tensor:
        return super().forward(piece.extended(self, x, self.left, self.right or None, activation=activation))

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if input.dtype == weight.dtype:
            return super()._conv_forward(input, weight, bias)
        return super()._conv_forward(input.to(weight.dtype), weight, bias).to(input.dtype)


def strided_delay(ahead: int, kernel: int, stride: int) -> int:
    """Delay of a strided convolution's output, where `ahead` is the padding on the left less the delay of the input."""
    return -((ahead - kernel) // stride + 1)


def causal_conv(inputs: int, outputs: int, kernel: int, *, dilation: int = 1, delay: int = 0) -> StreamConv:
    """Convolution that sees only the past."""
    return StreamConv(inputs, outputs, kernel, left=(kernel - 1) * dilation, dilation=dilation, delay=delay)


def lookahead_conv(inputs: int, outputs: int, kernel: int, *, delay: int = 0) -> StreamConv:
    """Convolution that sees only what follows."""
    return StreamConv(inputs, outputs, kernel, right=kernel - 1, delay=delay)


def centred_conv(
    inputs: int, outputs: int, kernel: int, *, dilation: int = 1, delay: int = 0, more: int = 0, bias: bool = True
) -> StreamConv:
    """Convolution with an odd kernel that sees as much on both sides."""
    reach = (kernel - 1) * dilation // 2
    sides = {"left": reach, "right": reach, "delay": delay, "more": more}
    return StreamConv(inputs, outputs, kernel, dilation=dilation, bias=bias, **sides)


class Overlap(Streaming):
    """Stream of a transposed convolution, whose kernels overlap: what it is run on, and what of its outputs is ready.

    Args:
        channels, kernel, stride: of the convolution's input, and its own.
        cut: outputs that are dropped at the start and at the end of a stream.
        pad: times that the edges of the input are repeated before the convolution.
        delay, more: of the input, see `Streaming`.
    """

    def __init__(
        self, channels: int, kernel: int, stride: int, *, cut: int, pad: int = 0, delay: int = 0, more: int = 0
    ) -> None:
        super().__init__()
        self.stride, self.cut, self.pad, self.delay, self.more = stride, cut, pad, delay, more
        if kept := (kernel - 1) // stride:
            self.keeps = (channels, kept)

    @property
    def delayed(self) -> int:
        return self.stride * (self.delay - self.pad) + self.cut

    def extended(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Input that is to be convolved."""
        return piece.extended(self, x, self.pad, self.pad, "replicate" if self.pad else "constant")

    def settled(self, y: torch.Tensor, inputs: int, piece: Piece) -> torch.Tensor:
        """Outputs that get nothing more from inputs to come, of those (B, C, T) of so many `extended` inputs."""
        if piece.state is None:
            return y[:, :, self.cut : y.shape[2] - self.cut]
        kept = self.keeps[-1] if self.keeps else 0
        return y[:, :, self.stride * kept : self.stride * inputs]


class StreamConvTranspose(nn.ConvTranspose1d):
    """Transposed convolution over a stream that makes `stride` outputs of every input.

    The kernel is longer than the stride by an even number, or as long; `delay` is that of the input.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, *, delay: int = 0) -> None:
        super().__init__(inputs, outputs, kernel, stride)
        self.overlap = Overlap(inputs, kernel, stride, cut=(kernel - stride) // 2, delay=delay)

    @property
    def delayed(self) -> int:
        return self.overlap.delayed

    def forward(self, x: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:  # type: ignore[override]
        x = self.overlap.extended(x, piece)
        y = F.conv_transpose1d(x.to(self.weight.dtype), self.weight, self.bias, self.stride).to(x.dtype)
        return self.overlap.settled(y, x.shape[2], piece)


class Delay(Streaming):
    """Lets a signal wait for another one that comes later: gives it `length` positions later than it comes.

    Length 0 changes nothing; channels and delay are those of the signal.
    """

    def __init__(self, channels: int, length: int, *, delay: int = 0) -> None:
        super().__init__()
        self.length, self.delay = length, delay
        if length:
            self.keeps = (channels, length)

    @property
    def delayed(self) -> int:
        return self.delay + self.length

    def forward(self, x: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:
        return piece.extended(self, x)[:, :, : x.shape[2]] if self.length else x


def state_specs(network: nn.Module) -> dict[Streaming, StateSpec]:
    """State specs of the layers of a network, in the order of its modules."""
    return {
        layer: StateSpec(name, layer.keeps, layer.state_dtype)
        for name, layer in network.named_modules()
        if isinstance(layer, Streaming) and layer.keeps
    }
