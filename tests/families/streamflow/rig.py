"""A small random StreamFlow flow, streams that end at their mel, and the same computed without any
engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from testkit import utterances
from testkit.utterances import Mel, Tokens
from token2wav import StreamConfig, Voice
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.streamflow import GuidedFlowConfig, StreamFlowConfig
from token2wav.families.streamflow.flow import WindowFlow
from token2wav.families.streamflow.solver import GuidedSolver
from token2wav.networks.masks import attention_bias
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import EulerSolver
from token2wav.published.sizes import BigVGANConfig, EstimatorConfig, GuidedAttention
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav.stages.stage import TokenChunk

MEL = 1e-5
BANDS, BLOCK_FRAMES, RATIO = 8, 12, 2
BLOCK = BLOCK_FRAMES // RATIO  # tokens
VOCABULARY = 40


def flow_config(
    depth: int = 5,
    backward: tuple[int, ...] = (2, 4),
    forward: tuple[int, ...] = (1,),
    steps: int = 4,
) -> GuidedFlowConfig:
    estimator = EstimatorConfig(
        dim=32,
        depth=depth,
        heads=2,
        dim_head=16,
        ff_mult=2,
        mel_dim=BANDS,
        mu_dim=BANDS,
        spk_dim=BANDS,
        out_channels=BANDS,
        static_chunk_size=BLOCK_FRAMES,
        guided=GuidedAttention.assigned(depth, backward, forward),
    )
    return GuidedFlowConfig(
        vocab_size=VOCABULARY,
        input_size=BANDS,
        spk_embed_dim=6,
        token_mel_ratio=RATIO,
        pre_lookahead_len=0,
        pre_lookahead_channels=0,
        lookbehind_len=0,
        inference_cfg_rate=0.5,
        estimator=estimator,
        n_timesteps=steps,
        chunk_blocks=2,
    )


def model_config(flow: GuidedFlowConfig) -> CosyVoice3Config:
    """The configuration of a model with a flow and a vocoder that nobody runs."""
    vocoder = BigVGANConfig(
        resblock="1",
        upsample_rates=(4,),
        upsample_kernel_sizes=(8,),
        upsample_initial_channel=8,
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),),
        activation="snake",
        snake_logscale=False,
        num_mels=BANDS,
        hop_size=4,
        sampling_rate=25 * RATIO * 4,
    )
    return StreamFlowConfig.of(flow, vocoder, 25.0)


@dataclass(frozen=True, eq=False)
class Parts:
    """A flow with random weights, as a service uses it."""

    config: GuidedFlowConfig
    flow: Flow
    noise: FlowNoise
    solver: EulerSolver

    @classmethod
    def random(cls, config: GuidedFlowConfig, device: str = "cpu") -> Parts:
        torch.manual_seed(0)
        flow = Flow(config).eval().requires_grad_(False).to(device)
        for name, weight in flow.named_parameters():
            if "attn.to_" in name:
                weight.mul_(3)  # makes errors of the attention masks visible
        solver = EulerSolver(flow.estimator, config.n_timesteps, config.inference_cfg_rate)
        return cls(config, flow, FlowNoise(BANDS), solver)

    def engine(self, graphs: GraphPool | None = None) -> WindowFlow:
        solver = GuidedSolver(self.flow.estimator, self.solver.tables, self.flow.unconditional())
        solvers = {self.config.n_timesteps: solver}
        config = model_config(self.config)
        return WindowFlow(
            config,
            self.flow,
            self.noise,
            solvers,
            self.config.past_tokens,
            graphs=graphs,
            longest_hop=config.hops(StreamConfig())[1],
        )

    def by_hand(self, tokens: Tokens, voice: Voice, first_block: int = 0) -> Mel:
        """Mel of tokens that begin with a block, computed as if nothing else were there: one call,
        masks from loops.
        """
        frames = RATIO * len(tokens)
        guided = self.config.guided
        biases = tuple(attention_bias(mask_by_hand(mask, frames)) for mask in guided.layers)
        first = first_block * BLOCK_FRAMES
        with torch.inference_mode():
            estimator, tables = self.flow.estimator, self.solver.tables
            mu = (
                self.flow.input_embedding(torch.tensor(tokens))
                .repeat_interleave(RATIO, dim=0)
                .T[None]
            )
            speaker = self.flow.speaker(torch.tensor(voice.speaker_embedding))[None]
            rope = estimator.rotary_embed(torch.arange(first, first + frames))
            x = self.noise.window(first, first + frames)[None]
            conditions = estimator.project_conditions(mu, speaker, None)
            nothing = estimator.project_conditions(
                torch.zeros_like(mu), torch.zeros_like(speaker), None
            )
            for width, modulation in zip(tables.widths, tables.modulation, strict=True):
                with_condition = estimator.velocity(x, conditions, modulation, biases, rope=rope)
                without = estimator.velocity(x, nothing, modulation, biases, rope=rope)
                x = x + width * (1.5 * with_condition - 0.5 * without)
        return x[0].numpy()


@cache
def mask_by_hand(mask: str, frames: int) -> torch.Tensor:
    steps = {"block": (0,), "backward": (-1, 0), "forward": (0, 1)}[mask]
    rows = [
        [key // BLOCK_FRAMES - query // BLOCK_FRAMES in steps for key in range(frames)]
        for query in range(frames)
    ]
    return torch.tensor(rows)


class GuidedStream:
    """Utterance that ends at its mel: a `Stream` without audio."""

    def __init__(self, parts: Parts, voice: Voice, stream: StreamConfig | None = None) -> None:
        self._engine = parts.engine()
        self._handle = self._engine.open(voice)
        schedule = HopSchedule.of(stream or StreamConfig(), model_config(parts.config))
        self._chunker = Chunker(voice.prompt_tokens, model_config(parts.config), schedule)
        self._chunks: list[torch.Tensor] = []
        self.windows: list[int] = []

    def push(self, tokens: Tokens, *, end: bool = False) -> None:
        self._chunker.push(tokens, end=end)
        while (chunk := self._chunker.next_chunk) is not None:
            past = len(self._engine.state(self._handle).past)
            self.windows.append(past + len(chunk.tokens))
            self._chunks += self._engine.advance([(self._handle, chunk)])
            self._chunker.finish_chunk()

    def finish(self) -> Mel:
        self.push(np.empty(0, np.int32), end=True)
        self._engine.close(self._handle)
        assert self._engine.open_streams == 0
        return torch.cat(self._chunks, dim=1).numpy()


def stream_mel(
    parts: Parts, portions: Iterable[Tokens], voice: Voice, stream: StreamConfig | None = None
) -> Mel:
    utterance = GuidedStream(parts, voice, stream)
    for portion in portions:
        utterance.push(portion)
    return utterance.finish()


def a_voice(seed: int = 0) -> Voice:
    return utterances.a_voice(0, seed, bands=BANDS, speaker=6)


def some_tokens(count: int, seed: int = 0) -> Tokens:
    return utterances.some_tokens(count, seed, vocabulary=VOCABULARY)


def chunks_of(tokens: Tokens, stops: Sequence[int]) -> list[TokenChunk]:
    """Cuts tokens into chunks with look-ahead."""
    chunks, start = [], 0
    for stop in stops:
        last = stop == stops[-1]
        chunk_tokens = tokens[start : stop if last else stop + BLOCK]
        chunks.append(TokenChunk(chunk_tokens, start, stop, last=last))
        start = stop
    return chunks


def spoken(
    engine: WindowFlow, utterances: Sequence[Sequence[TokenChunk]], voices: Sequence[int]
) -> list[torch.Tensor]:
    """Returns the mels (bands, frames) of streams. Their next chunks always run in one batch."""
    handles = [engine.open(a_voice(seed)) for seed in voices]
    mels: list[list[torch.Tensor]] = [[] for _ in handles]
    for row in itertools.zip_longest(*utterances):
        running = [index for index, chunk in enumerate(row) if chunk is not None]
        batch = [(handles[index], row[index]) for index in running]
        for index, mel in zip(running, engine.advance(batch), strict=True):
            mels[index].append(mel)
    for handle in handles:
        engine.close(handle)
    assert engine.open_streams == 0
    assert engine.advance([]) == []
    return [torch.cat(parts, dim=1) for parts in mels]
