"""Helpers of the tests of stages: parts of the tiny model, streams that end at their mel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from testkit.batches import WHOLE_BLOCKS
from testkit.flows import two_stages
from testkit.models.golden import TINY
from testkit.models.tiny_model import ODE_STEPS, tiny_config
from testkit.utterances import Mel, Tokens
from token2wav import StreamConfig, Token2Wav, Voice
from token2wav.assembly import load_network
from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache, Storage
from token2wav.config.model_config import ModelConfig
from token2wav.execution.runner import FlowRunner
from token2wav.execution.step import TorchStep
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.cosyvoice3.noise import load_flow_noise, load_source_noise
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import FlowNoise, SourceNoise
from token2wav.networks.ode import EulerSolver, OdeTables
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav.stages.cached_flow import CachedFlow, flow_states
from token2wav.stages.recompute import RecomputeFlow
from token2wav.stages.stage import FlowStage, TokenChunk
from token2wav.stages.waveform import WaveformStage

MEL = 2e-5  # tolerance in float32, see tests/families/cosyvoice3/tolerances.py
AUDIO = 1e-4
RESERVED = 3  # pages that an exact stream reserves when it opens


@dataclass(frozen=True, eq=False)
class Parts:
    """Tiny model with few ODE steps, loaded once, from which engines of any kind are made."""

    config: CosyVoice3Config
    flow: Flow
    hift: HiFT
    flow_noise: FlowNoise
    source_noise: SourceNoise
    solver: EulerSolver

    @classmethod
    def load(cls, ode_steps: int = ODE_STEPS) -> Parts:
        config = tiny_config(ode_steps)
        flow = load_network(TINY, config, "flow")
        solver = EulerSolver(flow.estimator, config.ode_steps, config.flow.inference_cfg_rate)
        return cls(
            config,
            flow,
            load_network(TINY, config, "vocoder"),
            load_flow_noise(TINY, config),
            load_source_noise(TINY, config),
            solver,
        )

    def layout(self, storage: Storage = "float32") -> CacheLayout:
        guidance = self.config.flow.inference_cfg_rate
        return CacheLayout.of(
            self.config, self.flow.estimator, guidance, self.config.ode_steps, storage
        )

    def incremental(
        self,
        pages: int = 64,
        *,
        storage: Storage = "float32",
        left_blocks: int = -1,
        longest_hop: int = 100,
        provisional_steps: int = 0,
        solver: CountingSolver | CheapSolver | None = None,
    ) -> CachedFlow:
        """Returns an incremental flow on torch.

        Args:
            provisional_steps: ODE steps of provisional chunks; 0 for the steps of all chunks.
        """
        estimator, steps, layout = self.flow.estimator, self.config.ode_steps, self.layout(storage)
        cache = PagedKVCache(layout, pages, self.flow.device)
        states = flow_states(self.flow, estimator, layout)

        def runners(tables: OdeTables) -> dict[int, FlowRunner]:
            return {steps: FlowRunner(TorchStep(estimator, tables, cache), states)}

        provisional = {}
        with torch.inference_mode():
            if provisional_steps:
                guidance = self.config.flow.inference_cfg_rate
                provisional = runners(
                    OdeTables.of(estimator, steps, guidance, evaluated=provisional_steps)
                )
            engine = CachedFlow(
                self.recompute(left_blocks=left_blocks),
                runners(self.solver.tables),
                cache,
                states,
                provisional_runners=provisional,
                longest_hop=longest_hop,
            )
        if solver is not None:
            solver.watch(engine)
        return engine

    def recompute(self, *, left_blocks: int = -1) -> RecomputeFlow:
        solvers = {self.config.ode_steps: self.solver}
        return RecomputeFlow(
            self.config, self.flow, self.flow_noise, solvers, left_blocks=left_blocks
        )

    def whole(self, tokens: Tokens, voice: Voice, *, left_blocks: int = -1) -> Mel:
        """Returns the mel of an utterance computed at once: the oracle."""
        return self.recompute(left_blocks=left_blocks).whole(tokens, voice, streaming=True).numpy()

    def model(self, flow: FlowStage[Any], stream: StreamConfig | None = None) -> Token2Wav:
        """Returns a model of a flow engine and the streaming vocoder."""
        vocoder = WaveformStage(self.hift, self.source_noise)
        return Token2Wav(self.config, two_stages(flow, vocoder), stream or WHOLE_BLOCKS)


class CountingSolver:
    """Counts the calls of an engine's solver, and runs a function before each call."""

    def __init__(self, before: Callable[[int], None] = lambda call: None) -> None:
        self.calls = 0
        self._before = before

    def watch(self, engine: CachedFlow) -> None:
        def watched(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(inputs: Any, *args: Any) -> Any:
                if len(inputs):
                    self.calls += 1
                    self._before(self.calls)
                return function(inputs, *args)

            return call

        _replace(engine, watched)


class CheapSolver:
    """Solver that computes nothing, so that thousands of streams run quickly.

    The accounting of streams and pages stays the same.
    """

    def watch(self, engine: CachedFlow) -> None:
        _replace(engine, lambda function: self._compute)

    def _compute(self, inputs: Any, *_: object) -> Any:
        if isinstance(inputs, torch.Tensor):
            return torch.zeros_like(inputs)
        return [torch.zeros_like(chunk.noise) for chunk in inputs]


def _replace(engine: CachedFlow, other: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the functions that compute chunks, both from the cache and by recomputing."""
    runners: dict[int, Any] = engine._runners
    solvers: dict[int, Any] = engine._recompute._solvers
    for steps in runners:
        runners[steps] = SimpleNamespace(run=other(runners[steps].run))
        solvers[steps] = SimpleNamespace(solve=other(solvers[steps].solve))


class FlowStream:
    """Utterance that ends at its mel: a `Stream` without a vocoder.

    Args:
        engine: flow engine.
        voice: voice of the speaker.
        config: configuration of the model.
        stream: configuration of the chunks.
    """

    def __init__(
        self,
        engine: FlowStage[Any],
        voice: Voice,
        config: ModelConfig,
        stream: StreamConfig | None = None,
    ) -> None:
        self._engine = engine
        self.handle = engine.open(voice)
        schedule = HopSchedule.of(stream or WHOLE_BLOCKS, config)
        self._chunker = Chunker(voice.prompt_tokens, config, schedule)
        self._mels: list[torch.Tensor] = []
        self.chunks: list[TokenChunk] = []

    @property
    def mel(self) -> Mel:
        """Returns the mel (bands, frames) so far as a vocoder receives it.

        The mel excludes the prompt, and frames that earlier chunks already returned.
        """
        return torch.cat(self._mels, dim=1).numpy()

    def push(self, tokens: Tokens) -> FlowStream:
        self._chunker.push(tokens)
        return self._run()

    def finish(self) -> FlowStream:
        self._chunker.push(np.empty(0, np.int32), end=True)
        return self._run()

    def close(self) -> None:
        self._engine.close(self.handle)

    def _run(self) -> FlowStream:
        while (chunk := self._chunker.next_chunk) is not None:
            [mel] = self._engine.advance([(self.handle, chunk)])
            self._mels.append(mel[:, 2 * chunk.skip :])
            self.chunks.append(chunk)
            self._chunker.finish_chunk()
        return self


def flow_mel(
    parts: Parts,
    engine: FlowStage[Any],
    portions: Iterable[Tokens],
    voice: Voice,
    stream: StreamConfig | None = None,
) -> Mel:
    """Streams an utterance in portions of tokens, closes the stream and returns the mel."""
    utterance = FlowStream(engine, voice, parts.config, stream)
    try:
        for portion in portions:
            utterance.push(portion)
        return utterance.finish().mel
    finally:
        utterance.close()


def unreferenced_evicted(engine: CachedFlow) -> int:
    """Evicts every prompt without a stream, and returns the number of pages still in use."""
    while engine.prefixes.evict():
        pass
    return engine.pool.used
