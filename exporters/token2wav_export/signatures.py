"""Signatures of graphs: they fix names, types and shapes of inputs and outputs for those who run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from token2wav.execution.artifacts import Graph, Precision
from token2wav.execution.exported_graphs import AUDIO, NEW, PAST, exported_states
from token2wav.families import Exportable
from token2wav.networks.dit import DiT
from token2wav.networks.estimator import MODULATION, PRESENT, ROPE, Estimator, cache_names
from token2wav.networks.hift import HiFT
from token2wav.networks.streaming import VocoderNetwork
from token2wav_export.errors import ExportError

Sizes = Mapping[str, int]  # of the free dimensions, by name: rows, frames, past


@dataclass(frozen=True)
class Axis:
    """Axis that is free, or follows from free ones: the sum of `terms` and a constant.

    Attributes:
        terms: factors of the free dimensions, by name.
        constant: number that is added to them.
    """

    terms: tuple[tuple[str, int], ...]
    constant: int = 0

    def of(self, sizes: Sizes) -> int:
        return sum(factor * sizes[name] for name, factor in self.terms) + self.constant

    def __str__(self) -> str:
        parts = [name if factor == 1 else f"{factor}*{name}" for name, factor in self.terms]
        return "+".join(parts + ([str(self.constant)] if self.constant else []))


@dataclass(frozen=True)
class TensorSpec:
    """Tensor that goes into a graph or comes out of it.

    Attributes:
        name: name in the graph.
        shape: sizes, and axes where they are free.
        dtype: number type, as numpy and torch call it.
    """

    name: str
    shape: tuple[int | Axis, ...]
    dtype: Literal["float32", "float16", "int64"] = "float32"

    def of(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape for given sizes of the free dimensions."""
        return tuple(axis.of(sizes) if isinstance(axis, Axis) else axis for axis in self.shape)


@dataclass(frozen=True)
class Signature:
    """Signature of a graph: it lists inputs and outputs in their order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def free(self) -> list[str]:
        """Names of the free dimensions."""
        axes = (axis for spec in self.inputs for axis in spec.shape if isinstance(axis, Axis))
        return list(dict.fromkeys(name for axis in axes for name, _ in axis.terms))


ROWS, FRAMES = Axis((("rows", 1),)), Axis((("frames", 1),))
PAST_FRAMES, KEYS = Axis((("past", 1),)), Axis((("past", 1), ("frames", 1)))


def signature(graph: Graph, precision: Precision, model: Exportable) -> Signature:
    """Returns the signature of a graph of a model.

    Raises:
        ExportError: there is no such graph of its flow.
    """
    if graph == "step":
        return _step(model.networks.flow.estimator, model.networks.layout.bands, precision)
    if graph.startswith("vocoder"):
        return _vocoder(model.networks.vocoder, whole=graph == "vocoder-whole")
    if not isinstance(model.networks.flow.estimator, DiT):
        raise ExportError(f"{graph}: only flows of CosyVoice3 have it; export the graphs step and vocoder")
    return _estimator(model.networks.layout.bands)


def _step(estimator: Estimator, bands: int, precision: Precision) -> Signature:
    layers, heads, dim_head = estimator.attention
    state = (ROWS, bands, FRAMES)
    modulation = estimator.modulation(*torch.zeros(2, 1, device="meta"))
    rope = estimator.rope(torch.zeros(1, 1, device="meta"))
    conv_state = (ROWS, estimator.state_width)
    caches = [(name, heads * dim_head) for name in cache_names(layers)]
    return Signature(
        inputs=(
            TensorSpec("x", state),
            TensorSpec("mu", state),
            TensorSpec("spks", (ROWS, bands)),
            TensorSpec("cond", state),
            *(TensorSpec(name, tuple(value.shape)) for name, value in zip(MODULATION, modulation, strict=False)),
            *(TensorSpec(name, (ROWS, FRAMES, dim_head)) for name, _ in zip(ROPE, rope, strict=False)),
            TensorSpec("bias", (ROWS, 1, FRAMES, KEYS)),
            TensorSpec("frames", (ROWS,), "int64"),
            *((TensorSpec(PRESENT, (ROWS, 1, FRAMES)),) if estimator.joined_prompts else ()),
            TensorSpec("conv_state", conv_state),
            *(TensorSpec(f"{PAST}{name}", (ROWS, PAST_FRAMES, inner), precision) for name, inner in caches),
        ),
        outputs=(
            TensorSpec("velocity", state),
            TensorSpec(f"{NEW}conv_state", conv_state),
            *(TensorSpec(f"{NEW}{name}", (ROWS, FRAMES, inner), precision) for name, inner in caches),
        ),
    )


def _estimator(bands: int) -> Signature:
    state = (ROWS, bands, FRAMES)
    return Signature(
        inputs=(
            TensorSpec("x", state),
            TensorSpec("mask", (ROWS, 1, FRAMES)),
            TensorSpec("mu", state),
            TensorSpec("t", (ROWS,)),
            TensorSpec("spks", (ROWS, bands)),
            TensorSpec("cond", state),
        ),
        outputs=(TensorSpec("estimator_out", state),),
    )


def _vocoder(vocoder: VocoderNetwork, *, whole: bool) -> Signature:
    samples = Axis((("frames", vocoder.frame_samples),))
    channel: tuple[int, ...] = () if isinstance(vocoder, HiFT) else (1,)
    signals = [TensorSpec("mel", (ROWS, vocoder.bands, FRAMES)), TensorSpec("source", (ROWS, 1, samples))]
    kept: dict[str, tuple[int | Axis, ...]]
    kept = {} if whole else {spec.name: (ROWS, *spec.shape) for spec in exported_states(vocoder).values()}
    return Signature(
        inputs=(
            *(signals if isinstance(vocoder, HiFT) else signals[:1]),
            *(TensorSpec(f"{PAST}{name}", shape) for name, shape in kept.items()),
        ),
        outputs=(
            TensorSpec(AUDIO, (ROWS, *channel, samples)),
            *(TensorSpec(f"{NEW}{name}", shape) for name, shape in kept.items()),
        ),
    )
