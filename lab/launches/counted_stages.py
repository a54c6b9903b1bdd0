"""Stages of a model on torch's device `meta`, as on a GPU: with CUDA graphs and kernels, but no
values. A `LaunchCounter` counts their launches. A captured function is recorded once; each replay
adds its record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from lab.launches.kernel_launches import ALL_PAGES
from lab.launches.launch import Record
from lab.launches.launch_counter import ENCODER, META, LaunchCounter
from token2wav import RuntimeConfig, StreamConfig, assembly
from token2wav.assembly import family_for
from token2wav.backends import LoadContext
from token2wav.config.model_config import ModelConfig, StageName
from token2wav.config.settings import DecoderPrecision
from token2wav.execution.cuda_graphs import CudaGraph, GraphPool, GraphSummary
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.stages.cached_flow import CachedFlow
from token2wav.stages.stage import EncoderInput, Stages

_NULL_AND_SCRATCH = 2  # pages that the cache adds to the number that it is given


@dataclass(frozen=True, eq=False)
class _CountedGraph(CudaGraph):
    """Function that stands for a captured one. It runs for its record, and only if a chunk is
    counted.
    """

    counter: LaunchCounter
    records: list[Record] = field(default_factory=list)

    def __call__(self) -> None:
        if not self.counter.counting:
            return
        if not self.records:
            with self.counter.collected(None):  # packs weights, as the call before a capture does
                self.function()
            with self.counter.collected(self.records):
                self.function()
        self.counter.replay(self.records)


class CountedGraphs(GraphPool):
    """Pool that captures nothing, and counts the launches of its functions."""

    def __init__(self, counter: LaunchCounter) -> None:
        self._counter, self.lock = counter, threading.RLock()
        self.summary = GraphSummary()

    def capture(self, function: Callable[[], None], *, in_steps: bool = False) -> CudaGraph:
        no_graph: Any = None
        return _CountedGraph(no_graph, function, self._counter)


def _assembled_on_meta(counter: LaunchCounter) -> ExitStack:
    """Makes assemblies work on `meta`, as on a GPU with as many pages as are needed."""

    def load_network(folder: Path, config: ModelConfig, name: StageName) -> Any:
        with META:
            network: Any = family_for(config).network(config, name)
        if isinstance(network, WaveformNetwork):
            network.freeze()
        if hasattr(network, "encode"):
            network.encode = _counted_encoder(counter, network.encode, config)
        # the freezing of noise makes tables on the CPU
        return network.to(META).eval().requires_grad_(False)

    stack = ExitStack()
    for name, replacement in {
        "graphs_enabled": lambda device: True,
        "GraphPool": lambda device: CountedGraphs(counter),
        "cache_pages": lambda context, page_bytes: ALL_PAGES - _NULL_AND_SCRATCH,
        "load_network": load_network,
    }.items():
        stack.enter_context(patch.object(assembly, name, replacement))
    return stack


def counted_stages(
    counter: LaunchCounter,
    config: ModelConfig,
    stream: StreamConfig,
    storage: Literal["auto", "float32", "int8", "float8"] = "auto",
    decoder_precision: DecoderPrecision = "float32",
) -> Stages:
    """Makes the stages of a model on `meta`, in float16, with weights that have no values.

    Args:
        counter: counter, which must be active. It counts the chunks that the stages compute.
        storage: dtype of the cached keys and values.
        decoder_precision: rounding of the operands of a codec.
    """
    runtime = RuntimeConfig(
        "auto",
        "torch",
        precision="float16",
        cache_storage=storage,
        decoder_precision=decoder_precision,
    )
    context = LoadContext(Path("no folder"), runtime, META)
    with counter.collected(None), _assembled_on_meta(counter):
        stages = assembly.Assembly(context, config, stream).stages()
    for name, stage in stages.by_name.items():
        if isinstance(stage, CachedFlow):
            stage.encoder_runner.run = _counted_stage(counter, ENCODER, stage.encoder_runner.run)  # type: ignore[method-assign]
        stage.advance = _counted_stage(counter, name, stage.advance)  # type: ignore[method-assign]
    return stages


def _counted_stage(
    counter: LaunchCounter, name: str, advance: Callable[..., list[torch.Tensor]]
) -> Callable[..., list[torch.Tensor]]:
    def counted(batch: Any) -> list[torch.Tensor]:
        with counter.stage(name):
            return advance(batch)

    return counted


def _counted_encoder(
    counter: LaunchCounter, encode: Callable[..., list[torch.Tensor]], config: ModelConfig
) -> Callable[..., list[torch.Tensor]]:
    def counted(batch: Sequence[EncoderInput], *states: Any) -> list[torch.Tensor]:
        """Encodes a chunk that is counted. Other chunks only get conditions of the right shape.

        A first call is not counted. It fills tables that later chunks use again.
        """
        if not counter.counting:
            chunks = [encoder_input.chunk for encoder_input in batch]
            frames = [config.token_mel_ratio * (chunk.stop - chunk.start) for chunk in chunks]
            return [torch.empty(config.mel_bands, count, device=META) for count in frames]
        with counter.collected(None):
            encode(batch[:1], *states)
        with counter.stage(ENCODER):
            return encode(batch, *states)

    return counted
