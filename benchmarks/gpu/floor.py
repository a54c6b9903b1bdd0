"""The least that a chunk can cost: bytes that must be read and arithmetic that must be done, over a device's rates.

Counted from the model's configuration, for one batch of chunks of one length at one place in their utterances. Weights
are read once per ODE step (they do not fit a cache), or once per call for what is outside the loop; keys and values of
all that a chunk sees are read once per step, its own are written. Matrix products, convolutions and attention count as
arithmetic, and nothing that goes element by element. Reading and computing can overlap, so the longer of both counts;
flow and vocoder follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from token2wav.artifacts import Precision
from token2wav.flow.cache import CacheLayout
from token2wav.flow_config import FlowConfig
from token2wav.hift_config import HiFTConfig
from token2wav.vocoder.convolutions import upsampling_reach
from token2wav.vocoder.f0 import F0_LOOKAHEAD

_CONV_KERNEL, _CONV_GROUPS, _POSITION_CONVS = 31, 16, 2  # of the estimator's input
_F0_CONVS, _F0_KERNEL = 4, 3
_POST_KERNEL = 7
_BYTES = {"float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Work:
    """What one batch costs at least.

    Attributes:
        weight_bytes: read.
        cache_bytes: of keys and values, read and written.
        half, single, double: floating-point operations in float16, float32 and float64; two for a multiplication with
            its addition.
    """

    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    half: float = 0.0
    single: float = 0.0
    double: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What a device was measured to do, per second.

    Attributes:
        bandwidth: bytes.
        half, single, double: operations of large matrix products, in float16, float32 and float64.
    """

    bandwidth: float
    half: float
    single: float
    double: float

    @classmethod
    def of(cls, measured: Mapping[str, Any]) -> Rates:
        """From what `rates.measure` gives."""
        products = measured["operations_per_s"]
        return cls(max(measured["bytes_per_s"].values()), products["float16"], products["float32"], products["float64"])


@dataclass(frozen=True)
class Floor:
    """Milliseconds of one stage: to read, and to compute. The larger is its floor."""

    memory_ms: float
    arithmetic_ms: float

    @classmethod
    def of(cls, work: Work, rates: Rates) -> Floor:
        memory = (work.weight_bytes + work.cache_bytes) / rates.bandwidth
        arithmetic = work.half / rates.half + work.single / rates.single + work.double / rates.double
        return cls(1000 * memory, 1000 * arithmetic)

    @property
    def ms(self) -> float:
        return max(self.memory_ms, self.arithmetic_ms)


def estimator_weights(config: FlowConfig) -> tuple[int, int]:
    """Weights that every step reads, biases left out: of attention, feed-forward and output, and of the input.

    What depends on the ODE time alone is a table.
    """
    estimator = config.estimator
    dim, inner = estimator.dim, estimator.heads * estimator.dim_head
    layer = 4 * dim * inner + 2 * dim * dim * estimator.ff_mult
    bands = 2 * estimator.mel_dim + estimator.mu_dim + estimator.spk_dim
    convolutions = _POSITION_CONVS * dim * (dim // _CONV_GROUPS) * _CONV_KERNEL
    return estimator.depth * layer + dim * estimator.out_channels, bands * dim + convolutions


def attended_pairs(frames: int, past: int, block: int) -> int:
    """Queries times the keys that they see, of a chunk of new frames after `past` frames: a block sees none later."""
    ends = range(block, frames + block, block)
    return sum((min(end, frames) - (end - block)) * (past + min(end, frames)) for end in ends)


def flow_work(
    config: FlowConfig, layout: CacheLayout, precision: Precision, streams: int, frames: int, past: int
) -> Work:
    """Of all ODE steps.

    Args:
        config: of the flow.
        layout: of its cache, with the number of steps.
        precision: of the estimator's layers; its input stays in float32.
        streams: in the batch.
        frames: of every chunk, mel.
        past: frames before it, the prompt's included.
    """
    layers, given = estimator_weights(config)
    rows = streams * layout.branches * frames
    pairs = streams * layout.branches * attended_pairs(frames, past, layout.block_frames)
    inner = layout.heads * layout.dim_head
    product = 2.0 * layout.steps * (rows * layers + 2 * layout.layers * pairs * inner)
    tokens = streams * frames / config.token_mel_ratio
    ahead = config.pre_lookahead_channels * config.input_size * (config.pre_lookahead_len + config.lookbehind_len + 2)
    outside = 2.0 * (layout.steps * rows * given + tokens * ahead)
    return Work(
        weight_bytes=layout.steps * (layers * _BYTES[precision] + given * 4) + 4 * ahead,
        cache_bytes=streams * (past + frames) / layout.block_frames * layout.page_bytes,
        half=product if precision == "float16" else 0.0,
        single=outside + (0.0 if precision == "float16" else product),
    )


def vocoder_work(config: HiFTConfig, streams: int, frames: int) -> Work:
    """Of HiFT in float32, with its F0 in float64, for the new frames alone: what a window repeats is not needed."""
    network, weights = _network(config)
    channels, bands = config.f0_channels, config.in_channels
    pitch = channels * bands * (F0_LOOKAHEAD + 1) + _F0_CONVS * channels * channels * _F0_KERNEL + channels
    count = streams * frames
    return Work(weight_bytes=4 * weights + 8 * pitch, single=2.0 * count * network, double=2.0 * count * pitch)


def _network(config: HiFTConfig) -> tuple[int, int]:
    """Multiplications for a mel frame, and weights."""
    bins = config.n_fft + 2
    width = config.base_channels
    first = config.in_channels * width * (config.conv_pre_look_right + 1)
    products, weights = first, first
    positions, stride = 1, config.samples_per_frame // config.hop_len
    branches = list(zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True))
    for stage, rate in enumerate(config.upsample_rates):
        positions, stride = positions * rate, stride // rate
        before, width = width, width // 2
        kernel = config.upsample_kernel_sizes[stage]
        blocks = [
            *branches,
            (config.source_resblock_kernel_sizes[stage], config.source_resblock_dilation_sizes[stage]),
        ]
        down = bins * width * (2 * stride if stride > 1 else 1)
        residual = sum(2 * len(dilations) * size * width * width for size, dilations in blocks)
        taps = before * width * (upsampling_reach(kernel, rate) + 1)  # of each place in a repeat
        products += positions * (taps + down + residual)
        weights += rate * taps + down + residual
    last = width * bins * _POST_KERNEL
    transforms = 2 * bins * config.n_fft  # forth and back
    return products + positions * (last + transforms), weights + last


def as_row(flow: Work, vocoder: Work, rates: Rates) -> dict[str, Any]:
    """Both stages for a table, in milliseconds."""
    floors = {"flow": Floor.of(flow, rates), "vocoder": Floor.of(vocoder, rates)}
    parts = {
        f"{stage}_{name}": round(value, 4) for stage, each in floors.items() for name, value in asdict(each).items()
    }
    return {"floor_ms": round(sum(each.ms for each in floors.values()), 4), **parts}
