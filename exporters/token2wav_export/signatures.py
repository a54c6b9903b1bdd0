"""Signatures of graphs: names, types and shapes of the inputs and outputs. The backends that run a
graph use the same names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from token2wav.assembly import Exportable
from token2wav.config.model_config import StageName
from token2wav.exported.run import (
    AUDIO,
    NEW,
    NOISE_FACTOR,
    PAST,
    exported_states,
    signals_of,
    takes_noise_factor,
)
from token2wav.layers.streaming import StateSpec
from token2wav.networks.dit import DiT
from token2wav.networks.estimator import MODULATION, PRESENT, ROPE, Estimator, cache_names
from token2wav.networks.hift import HiFT
from token2wav.published.artifacts import GraphName, Precision, stage_of
from token2wav_export import ExportError

TypeName = Literal["float32", "float16", "int32", "int64"]  # dtype by its name in numpy and torch
_NAMES: dict[torch.dtype, TypeName] = {
    torch.float32: "float32",
    torch.int32: "int32",
    torch.int64: "int64",
}

Sizes = Mapping[str, int]  # sizes of the free dimensions by name: rows, frames, past


class Axis(NamedTuple):
    """Axis of variable length: a multiple of the sum of the named free dimensions."""

    names: tuple[str, ...]
    factor: int = 1

    def of(self, sizes: Sizes) -> int:
        return self.factor * sum(sizes[name] for name in self.names)

    def __str__(self) -> str:
        total = "+".join(self.names)
        return total if self.factor == 1 else f"{self.factor}*{total}"


@dataclass(frozen=True)
class TensorSpec:
    """Input or output tensor of a graph."""

    name: str
    shape: tuple[int | Axis, ...]  # an `Axis` for each axis of variable length
    dtype: TypeName = "float32"

    def of(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape for given sizes of the free dimensions."""
        return tuple(axis.of(sizes) if isinstance(axis, Axis) else axis for axis in self.shape)


class Signature(NamedTuple):
    """Signature of a graph: its inputs and outputs in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


ROWS, FRAMES, PAST_FRAMES, KEYS = (
    Axis(names) for names in (("rows",), ("frames",), ("past",), ("past", "frames"))
)


def signature(graph: GraphName, precision: Precision, model: Exportable) -> Signature:
    """Returns the signature of a graph. Raises ExportError if the model has no such graph."""
    if stage_of(graph) not in model.networks:
        graphs = ", ".join(name for name in get_args(GraphName) if stage_of(name) in model.networks)
        raise ExportError(f"{graph}: this model has no such graph; it has {graphs}")
    if graph == "step":
        return _step(model.networks["flow"].estimator, model.config.mel_bands, precision)
    if stage_of(graph) != "flow":
        return _vocoder(model, stage_of(graph), whole=graph == "vocoder-whole")
    if not isinstance(model.networks["flow"].estimator, DiT):
        raise ExportError(
            f"{graph}: only CosyVoice3 has this graph; export the graphs step and vocoder"
        )
    return _estimator(model.config.mel_bands)


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
            *(
                TensorSpec(name, tuple(value.shape))
                for name, value in zip(MODULATION, modulation, strict=False)
            ),
            *(
                TensorSpec(name, (ROWS, FRAMES, dim_head))
                for name, _ in zip(ROPE, rope, strict=False)
            ),
            TensorSpec("bias", (ROWS, 1, FRAMES, KEYS)),
            TensorSpec("frames", (ROWS,), "int64"),
            *((TensorSpec(PRESENT, (ROWS, 1, FRAMES)),) if estimator.masks_padding else ()),
            TensorSpec("conv_state", conv_state),
            *(
                TensorSpec(f"{PAST}{name}", (ROWS, PAST_FRAMES, width), precision)
                for name, width in caches
            ),
        ),
        outputs=(
            TensorSpec("velocity", state),
            TensorSpec(f"{NEW}conv_state", conv_state),
            *(
                TensorSpec(f"{NEW}{name}", (ROWS, FRAMES, width), precision)
                for name, width in caches
            ),
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


def _vocoder(model: Exportable, stage: StageName, *, whole: bool) -> Signature:
    vocoder = model.networks[stage]
    samples = Axis(FRAMES.names, vocoder.frame_samples)
    channel: tuple[int, ...] = () if isinstance(vocoder, HiFT) else (1,)
    shapes: list[tuple[int | Axis, ...]] = [
        (ROWS, vocoder.input_channels, FRAMES),
        (ROWS, 1, samples),
    ]
    dtypes: tuple[TypeName, TypeName] = _NAMES[vocoder.input_dtype], "float32"
    signals = zip(signals_of(stage, vocoder), shapes, dtypes, strict=False)
    states = [] if whole else list(exported_states(vocoder).values())
    return Signature(
        inputs=(
            *(TensorSpec(*signal) for signal in signals),
            *([TensorSpec(NOISE_FACTOR, (ROWS,), "int64")] if takes_noise_factor(vocoder) else ()),
            *(_state(PAST, spec) for spec in states),
        ),
        outputs=(
            TensorSpec(AUDIO, (ROWS, *channel, samples)),
            *(_state(NEW, spec) for spec in states),
        ),
    )


def _state(prefix: str, spec: StateSpec) -> TensorSpec:
    """Returns the state of a layer as an input or as an output."""
    return TensorSpec(f"{prefix}{spec.name}", (ROWS, *spec.shape), _NAMES[spec.dtype])
