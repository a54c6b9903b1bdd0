"""Modules that combine streaming layers, and place them (`layers/streaming.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from token2wav.layers.convolutions import StreamConv, StreamConvTranspose
from token2wav.layers.streaming import OFFLINE, ON_TIME, Delay, StreamModule, StreamStep, Timing


class Chain(nn.Sequential, StreamModule):
    """Layers in sequence.

    A module without `place` computes every position alone. Before a convolution it is an
    `Activation`, which writes its result into the input of the convolution.

    Args:
        layers: the layers, by name if weights need other names than 0, 1, 2 ...
    """

    def __init__(self, layers: Mapping[str, nn.Module] | Iterable[nn.Module]) -> None:
        super().__init__()
        items = layers.items() if isinstance(layers, Mapping) else enumerate(layers)
        for name, layer in items:
            self.add_module(str(name), layer)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        return run(self, x, step)


class Residual(Chain):
    """Layers in sequence, the last one a convolution. Their result is added to their input, which
    is delayed to match.
    """

    def __init__(self, channels: int, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(layers)
        self.wait = Delay(channels)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        output = placed(self._branch, timing)
        self.wait.align(timing, output)
        return output

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        return run(self._branch, x, step).add_(self.wait(x, step))

    @property
    def _branch(self) -> list[nn.Module]:
        return list(self)[:-1]


class Mean:
    """Mean of parallel layers, modules with `place` that read the same signal. A delay follows each
    layer, so that all are equally late.

    It is no module: layers and delays are parts of the network that makes it.
    """

    def __init__(self, branches: Iterable[nn.Module], waits: Iterable[nn.Module]) -> None:
        self._branches = list(zip(branches, waits, strict=True))

    def place(self, timing: Timing) -> Timing:
        signals = [placed((branch,), timing) for branch, _ in self._branches]
        latest = max(signals)
        for signal, (_, wait) in zip(signals, self._branches, strict=True):
            wait.align(signal, latest)  # type: ignore[operator]
        return latest

    def __call__(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        total, *outputs = [wait(branch(x, step), step) for branch, wait in self._branches]
        for output in outputs:
            total += output
        return total / len(self._branches)


def placed(layers: Iterable[nn.Module], timing: Timing = ON_TIME) -> Timing:
    """Places layers in sequence, and returns the output timing of the last one."""
    for layer in layers:
        if isinstance(layer, StreamModule):
            timing = layer.place(timing)
    return timing


def run(layers: Iterable[nn.Module], x: torch.Tensor, step: StreamStep) -> torch.Tensor:
    pointwise: nn.Module | None = None  # module without `place` that was not computed yet
    for layer in layers:
        if pointwise is not None and not isinstance(layer, StreamConv | StreamConvTranspose):
            x, pointwise = pointwise(x), None
        if not isinstance(layer, StreamModule):
            pointwise = layer
        elif pointwise is None:
            x = layer(x, step)
        else:
            x, pointwise = layer(x, step, pointwise), None
    return x if pointwise is None else pointwise(x)
