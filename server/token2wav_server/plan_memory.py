"""Memory capacity of a GPU: the memory of one stream, and the number of streams that fit.

The memory of a stream is measured with the code that serves streams. The flow stage runs on torch's
`meta` device, where weights and cache are tensors that have a shape but no content. A runner that
returns only shapes replaces the integration of the ODE. So the stage allocates, keeps and releases
the pages of a stream exactly as on a server, but without memory and arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from token2wav.assembly import family_for, flow_networks
from token2wav.cache.block_pool import PageNeeds
from token2wav.cache.paged_kv_cache import PagedKVCache, Storage
from token2wav.cache.states import StateStore
from token2wav.config import StreamConfig
from token2wav.config.model_config import ModelConfig
from token2wav.execution.batch import ChunkInput
from token2wav.execution.device import cuda_cache_bytes
from token2wav.execution.runner import FlowRunner
from token2wav.layers.streaming import state_specs
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import EulerSolver, OdeTables
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.published.window_config import WindowCodecConfig
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav.stages.cached_flow import CachedFlow, flow_states, page_needs
from token2wav.stages.recompute import RecomputeFlow
from token2wav.voice import Voice

_META = torch.device("meta")
_STATES = "memory outside the cache, for the state of each stream"


@dataclass(frozen=True)
class StreamNeeds:
    """Memory that one stream needs.

    Attributes:
        page_bytes: bytes of a page, which holds the keys and values of one attention block; 0 for a
            codec and for a flow that computes windows, which have no pages.
        prompt_pages: pages that hold the prompt, shared by all streams of the voice.
        pages: largest number of other pages that the stream holds between its chunks.
        chunk_pages: largest number of further pages that a chunk borrows while it is computed.
        context_bytes: bytes that the stream needs besides its pages.
    """

    page_bytes: int
    prompt_pages: int
    pages: int
    chunk_pages: int
    context_bytes: int


@dataclass(frozen=True)
class GpuMemory:
    """Shares of a GPU's memory in bytes, and the number of streams that fit.

    Attributes:
        taken: memory that CUDA itself and other programs take.
        weights: weights of all stages, and tables computed from weights.
        vocoder: tensors of the vocoder's CUDA graphs.
        cache: pages of keys and values.
        graphs: nodes of CUDA graphs.
        rest: remaining memory, for batches, activations and contexts of streams.
        binds: name of the resource that limits the number of streams.
    """

    total: int
    taken: int
    weights: int
    vocoder: int
    cache: int
    graphs: int
    rest: int
    streams: int
    binds: str


def stream_needs(
    model: ModelConfig,
    stream: StreamConfig,
    storage: Storage,
    prompt_tokens: int,
    stream_tokens: int,
) -> StreamNeeds:
    """Measures the memory of one stream by running it through the flow stage without arithmetic.

    A codec has no flow and no pages, and a flow that computes windows stores none. The size of
    their states does not depend on the other arguments. A codec that decodes windows has no states,
    and keeps codes and audio.

    Args:
        storage: dtype of the cache.
        stream_tokens: tokens of the stream, at least 1.
    """
    if "flow" not in model.stages or not family_for(model).paged_flow:
        if isinstance(model, WindowCodecConfig):
            return StreamNeeds(0, 0, 0, 0, model.stream_bytes)
        states = StateStore({"last": state_specs(_last_network(model))}, _META, slots=1)
        return StreamNeeds(0, 0, 0, 0, states.slot_bytes)
    longest_hop, steps, window = model.hops(stream)[1], model.ode_steps, model.window(stream)
    # Pages for the utterance, and for the blocks that a stream with a window reserves in addition.
    blocks = (prompt_tokens + stream_tokens) // model.block_tokens
    capacity = blocks + window + longest_hop // model.block_tokens + 8
    with _META:
        networks = flow_networks(model, storage)
    noise = FlowNoise(model.mel_bands)
    solver = EulerSolver(networks.flow.estimator, steps, networks.guidance, networks.schedule)
    recompute = RecomputeFlow(model, networks.flow, noise, {steps: solver}, left_blocks=window)
    cache = PagedKVCache(networks.layout, capacity, _META)
    states = flow_states(networks.flow, networks.flow.estimator, networks.layout)
    flow = CachedFlow(recompute, {steps: _ShapeRunner()}, cache, states, longest_hop=longest_hop)
    voice = Voice(
        model.tokens.zeros(prompt_tokens),
        np.zeros((model.token_mel_ratio * prompt_tokens, model.mel_bands)),
        np.zeros(model.speaker_size),
    )
    chunker = Chunker(voice.prompt_tokens, model, HopSchedule.of(stream, model))
    chunker.push(model.tokens.zeros(stream_tokens), end=True)
    handle = flow.open(voice)
    peak_pages = flow.pool.used
    while (chunk := chunker.next_chunk) is not None:
        flow.advance([(handle, chunk)])
        peak_pages = max(peak_pages, flow.pool.used)
        chunker.finish_chunk()
    prompt_pages = flow.usage().shared
    flow.close(handle)
    chunk_pages = 0 if window < 0 else page_needs(model, window, longest_hop).chunk
    return StreamNeeds(
        networks.page_bytes,
        prompt_pages,
        peak_pages - prompt_pages - chunk_pages,
        chunk_pages,
        states.slot_bytes,
    )


def weight_bytes(model: ModelConfig, precision: str) -> int:
    """Returns the bytes of all stages' weights on a server's device.

    The tables that are computed from the times of the ODE steps are included.
    """
    if "flow" not in model.stages:
        return sum(tensor.nbytes for tensor in _last_network(model).state_dict().values())
    with _META:
        networks = flow_networks(model, "float32")
    flow, vocoder = networks.flow, networks.vocoder
    tables = OdeTables.of(flow.estimator, model.ode_steps, networks.guidance, networks.schedule)
    vocoder.freeze()
    flow.estimator.drop_time_weights()
    if precision == "float16":
        flow.estimator.halve()
    weights = [*flow.state_dict().values(), *vocoder.state_dict().values()]
    return sum(tensor.nbytes for tensor in [*weights, *_tensors(tables.modulation)])


def _last_network(model: ModelConfig) -> WaveformNetwork:
    """Makes the network of a vocoder or a codec without weights."""
    with _META:
        network: Any = family_for(model).network(model, model.stages[-1])
    network.freeze()
    last: WaveformNetwork = network
    return last


def _tensors(value: object) -> list[torch.Tensor]:
    """Collects all tensors in nested lists, tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    return (
        [tensor for part in value for tensor in _tensors(part)]
        if isinstance(value, (list, tuple))
        else []
    )


def share_out(
    total: int,
    taken: int,
    weights: int,
    cache: int,
    needs: StreamNeeds,
    voices: int,
    chunks: int,
    graphs: int = 0,
    vocoder: int = 0,
) -> GpuMemory:
    """Divides the memory of a GPU into shares, and counts the streams that fit.

    Args:
        total, taken, weights: see `GpuMemory`.
        cache: bytes of the cache; 0 for the share of free memory that a server takes by default.
        voices: voices with a prompt in the cache.
        chunks: largest number of chunks that are computed at the same time.
        graphs: bytes of CUDA graph nodes. The server allocates them after the cache.
        vocoder: bytes of the vocoder's CUDA graph tensors. The server allocates them before the
            cache, which gets a share of the rest.
    """
    vocoder = max(0, min(vocoder, total - taken - weights))
    free = max(0, total - taken - weights - vocoder)
    cache = min(cache, free) if cache else cuda_cache_bytes(free) if needs.page_bytes else 0
    graphs = min(graphs, free - cache)
    rest = free - cache - graphs
    streams, binds = rest // needs.context_bytes, _STATES
    if needs.page_bytes:
        pages = max(0, cache // needs.page_bytes - voices * needs.prompt_pages)
        by_pages = PageNeeds(needs.pages, needs.chunk_pages).streams(pages, chunks)
        if by_pages is not None and by_pages <= streams:
            streams, binds = by_pages, "cache pages"
    if not free:
        binds = "weights"
    return GpuMemory(total, taken, weights, vocoder, cache, graphs, rest, streams, binds)


class _ShapeRunner(FlowRunner):
    """Runner of the flow that returns mel without content."""

    def __init__(self) -> None:
        pass

    def run(self, chunks: Sequence[ChunkInput]) -> list[torch.Tensor]:
        return [chunk.noise for chunk in chunks]
