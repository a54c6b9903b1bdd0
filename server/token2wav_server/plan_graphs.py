"""Memory of a model's CUDA graphs, estimated from their nodes."""

from __future__ import annotations

from typing import Any

import torch

from token2wav.assembly import family_for
from token2wav.config import StreamConfig
from token2wav.config.model_config import ModelConfig
from token2wav.execution.captured_sizes import (
    CAPTURED_BLOCKS,
    CAPTURED_STREAMS,
    CAPTURED_WINDOWS,
    PROVISIONAL_BLOCKS,
)
from token2wav.networks.hift import HiFT
from token2wav.published.registry import family_name
from token2wav.stages.piece_sizes import kernel_sizes
from token2wav.stages.waveform import likely_pieces

# Nodes of a CUDA graph of the encoder, and of one ODE step, by family. They are the launches that
# `lab.launches.table` counts for one stream at the published sizes, which change with the layers of
# a model. A graph of a large batch has up to an eighth more.
_FLOW_NODES = {
    "cosyvoice3": (34, 183),
    "cosyvoice2": (274, 471),
    "chatterbox": (274, 471),
    "stepaudio2": (274, 179),
    "streamflow": (53, 223),
    "qwen25_omni": (53, 846),  # four evaluations in a step
}
_HIFT_NODES = 61
_BIGVGAN_NODES = 101  # for each upsampling layer
# Memory of a node. A user of driver 470 saw 63 to 66 KB for each node of an empty kernel
# (https://forums.developer.nvidia.com/t/244901). Newer drivers are said to need less.
NODE_BYTES = 64 << 10
# Memory of the tensors of HiFT's graphs for each frame of a batch: tensors of the public model (512
# channels, 480 samples a frame) that exist at the same time, counted on torch's `meta`.
_FRAME_BYTES, _CHANNELS, _SAMPLES = 707_000, 512, 480


def graph_nodes(model: ModelConfig, stream: StreamConfig) -> int:
    """Estimates the nodes of all CUDA graphs of a model.

    Returns 0 for a codec, and for a family outside this project, because its nodes were not
    counted.
    """
    family = family_name(model)
    if family not in _FLOW_NODES:
        return 0
    encoder, step = _FLOW_NODES[family]
    vocoder = _vocoder(model)
    sizes = CAPTURED_BLOCKS if family_for(model).paged_flow else CAPTURED_WINDOWS
    nodes = len(sizes) * (encoder + model.ode_steps * step)
    provisional_steps = model.provisional_steps(stream, model.ode_steps)
    if provisional_steps < model.ode_steps:
        batches = sum(blocks <= PROVISIONAL_BLOCKS for blocks in CAPTURED_BLOCKS)
        nodes += batches * provisional_steps * step
    if isinstance(vocoder, HiFT):
        pieces = kernel_sizes(vocoder.lookahead_frames, model, model.hops(stream))
        return nodes + len(pieces) * _HIFT_NODES
    shapes = likely_pieces(vocoder, model, model.hops(stream), CAPTURED_STREAMS)
    return nodes + len(shapes) * _BIGVGAN_NODES * len(vocoder.config.upsample_rates)


def vocoder_bytes(model: ModelConfig, stream: StreamConfig) -> int:
    """Estimates the tensor bytes of HiFT's CUDA graphs, which share the largest graph's memory.

    Returns 0 for a model without HiFT, because the tensors of other networks were not counted.
    """
    vocoder = _vocoder(model) if "flow" in model.stages else None
    if not isinstance(vocoder, HiFT):
        return 0
    batches = kernel_sizes(vocoder.lookahead_frames, model, model.hops(stream))
    frames = max(batch.rows * batch.length for batch in batches)
    size = vocoder.config.base_channels * vocoder.config.samples_per_frame
    return round(frames * _FRAME_BYTES * size / (_CHANNELS * _SAMPLES))


def _vocoder(model: ModelConfig) -> Any:
    """Makes the vocoder of a model without weights."""
    with torch.device("meta"):
        return family_for(model).network(model, "vocoder")
