"""Flow of CosyVoice3 as today's best public servers compute it, for a comparison on one GPU.

Like the servers in `docs/benchmarking.md` that cache most, it stores the keys, values and
convolution inputs of every ODE step and layer, computes a chunk of streams at the same position as
one batch, compiles each layer with `torch.compile`, uses torch's attention, and replays all ODE
steps as one CUDA graph. It shares weights, encoder and noise with the flow that it is compared
with. Unlike token2wav's flow it has dense caches of a fixed length, no pages, and no kernels of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.execution.cuda_graphs import GraphPool, graphs_enabled
from token2wav.networks.estimator import Attend, AttentionContext, Convolution
from token2wav.networks.masks import attention_bias
from token2wav.networks.ode import OdeTables
from token2wav.stages.recompute import RecomputeFlow
from token2wav.stages.stage import (
    DEFAULT_OPTIONS,
    EncoderInput,
    FlowStage,
    StreamOptions,
    TokenChunk,
)
from token2wav.voice import Voice

_BRANCHES = 2  # rows of a stream: with its conditions, and without


@dataclass(eq=False)
class _Stream:
    """Stream in row `row` of the caches, with all tokens before its next chunk."""

    row: int
    voice: Voice
    tokens: NDArray[np.int32]


@dataclass(eq=False)
class _LayerCache(AttentionContext):
    """Cache of one layer at one ODE step, up to the end of the chunk.

    Attributes:
        keys, values: (rows, frames, inner); the chunk writes the last frames.
        tails: (rows, channels, positions) last inputs of each position convolution.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tails: Sequence[torch.Tensor]

    def convolve(self, index: int, conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        tail = self.tails[index]
        x = torch.cat((tail, x), dim=2)
        tail.copy_(x[:, :, -tail.shape[2] :])
        return conv(x)

    def attend(
        self,
        layer: int,
        attend: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        self.keys[:, -k.shape[1] :] = k
        self.values[:, -v.shape[1] :] = v
        return attend(q, self.keys, self.values, bias)


class PeerFlow(FlowStage[_Stream]):
    """Flow stage with dense caches.

    Args:
        flow: flow whose weights, encoder and noise are shared; its model uses guidance.
        streams: rows of the caches.
        frames: length of the caches, with the prompt.
    """

    def __init__(self, flow: RecomputeFlow, streams: int, frames: int) -> None:
        super().__init__()
        self._flow, self._config = flow, flow.config
        self._ratio = flow.config.token_mel_ratio
        self._estimator, self._tables = estimator_of(flow)
        layers, heads, size = self._estimator.attention
        rows, steps = _BRANCHES * streams, len(self._tables.modulation)
        self._keys = torch.zeros(
            *(steps, layers, 2, rows, frames, heads * size),
            dtype=self._estimator.cache_type,
            device=flow.device,
        )
        self._tails = [
            torch.zeros(steps, rows, *shape, device=flow.device)
            for shape in self._estimator.conv_state_shapes
        ]
        self._free = list(range(streams))[::-1]
        self._prompts: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._pool = GraphPool(flow.device) if graphs_enabled(flow.device) else None
        self._graphs: dict[tuple[int, ...], tuple[Callable[[], None], list[torch.Tensor]]] = {}

    @torch.inference_mode()
    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        prefix = self._config.grid(len(voice.prompt_tokens)).prefix
        stream = _Stream(self._free.pop(), voice, voice.prompt_tokens[:0])
        rows, frames = self._rows(stream.row, 1), prefix * self._ratio
        caches = [self._keys[:, :, :, rows, :frames], *(tail[:, rows] for tail in self._tails)]
        if voice.content_hash not in self._prompts:
            for tail in caches[1:]:
                tail.zero_()
            if prefix:
                tokens = voice.prompt_tokens[: prefix + self._config.lookahead_tokens]
                self._compute([stream], [TokenChunk(tokens, 0, prefix, last=False)])
            self._prompts[voice.content_hash] = (
                caches[0].clone(),
                [tail.clone() for tail in caches[1:]],
            )
        keys, tails = self._prompts[voice.content_hash]
        for cache, content in zip(caches, (keys, *tails), strict=True):
            cache.copy_(content)
        stream.tokens = voice.prompt_tokens[:prefix]
        return self.register(stream)

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        """Computes chunks as one batch if they are alike and their rows follow one another, and
        else one by one.
        """
        streams, chunks = [self.state(handle) for handle, _ in batch], [chunk for _, chunk in batch]
        alike = {(chunk.start, chunk.stop, chunk.last) for chunk in chunks}
        rows = [stream.row for stream in streams]
        if len(alike) == 1 and rows == list(range(rows[0], rows[0] + len(rows))):
            return self._compute(streams, chunks)
        pairs = zip(streams, chunks, strict=True)
        return [self._compute([stream], [chunk])[0] for stream, chunk in pairs]

    def close(self, handle: int) -> None:
        self._free.append(self.state(handle).row)
        super().close(handle)

    def whole(
        self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0
    ) -> torch.Tensor:
        return self._flow.whole(tokens, voice, streaming=streaming, steps=steps)

    def _rows(self, row: int, streams: int) -> slice:
        return slice(_BRANCHES * row, _BRANCHES * (row + streams))

    def _compute(
        self, streams: Sequence[_Stream], chunks: Sequence[TokenChunk]
    ) -> list[torch.Tensor]:
        """Computes the mel (bands, frames) of chunks that are alike, of streams in adjacent rows.

        The encoder has two convolutions only, so it encodes each utterance from its start.
        """
        start, stop = self._ratio * chunks[0].start, self._ratio * chunks[0].stop
        inputs, conds = [], []
        for stream, chunk in zip(streams, chunks, strict=True):
            tokens = np.concatenate((stream.tokens, chunk.tokens))
            stream.tokens = tokens[: chunk.stop]
            whole = TokenChunk(tokens, 0, chunk.stop, chunk.last)
            inputs.append(EncoderInput(whole, self._config.grid(len(stream.voice.prompt_tokens))))
            prompt = torch.tensor(stream.voice.prompt_mel, device=self._flow.device).T[
                :, start:stop
            ]
            conds.append(torch.nn.functional.pad(prompt, (0, stop - start - prompt.shape[1])))
        mu = torch.stack([mu[:, start:] for mu in self._flow.encoder.encode(inputs)])
        embeddings = [torch.tensor(stream.voice.speaker_embedding) for stream in streams]
        speaker = torch.stack(
            [self._flow.encoder.speaker(vector.to(mu.device)) for vector in embeddings]
        )
        # The rows of a stream follow one another. Without conditions all of them are zero.
        branches = (
            torch.stack((value, torch.zeros_like(value)), dim=1).flatten(0, 1)
            for value in (mu, speaker, torch.stack(conds))
        )
        conditions = self._estimator.project_conditions(*branches)
        noise = self._flow.noise.window(start, stop).expand(len(streams), -1, -1)
        return list(self._solve(streams[0].row, start, noise, conditions))

    def _solve(
        self, row: int, start: int, noise: torch.Tensor, conditions: torch.Tensor
    ) -> torch.Tensor:
        """Integrates noise (streams, bands, frames) to mel; on a GPU by a graph of this shape."""
        if self._pool is None:
            return self._integrate(row, start, noise, conditions)
        key = (row, start, *noise.shape)
        if key not in self._graphs:
            held = [noise.clone(), conditions.clone(), noise.clone()]
            rows = self._rows(row, len(noise))
            before = [tail[:, rows].clone() for tail in self._tails]

            def run() -> None:
                held[2].copy_(self._integrate(row, start, held[0], held[1]))

            self._graphs[key] = self._pool.capture(run), held
            # The runs before the capture have replaced the inputs of the convolutions.
            for tail, content in zip(self._tails, before, strict=True):
                tail[:, rows].copy_(content)
        graph, held = self._graphs[key]
        held[0].copy_(noise)
        held[1].copy_(conditions)
        graph()
        return held[2].clone()

    def _integrate(
        self, row: int, start: int, x: torch.Tensor, conditions: torch.Tensor
    ) -> torch.Tensor:
        stop, rows = start + x.shape[2], self._rows(row, len(x))
        positions = torch.arange(stop, device=x.device)
        rope, bias = self._estimator.rope(positions[start:]), None
        grid = self._config.grid(0).scaled(self._ratio)
        if x.shape[2] > grid.block:
            bias = attention_bias(grid.allows(positions[start:], positions))
            bias = bias.to(self._estimator.score_dtype)
        guidance = self._tables.guidance
        for step, width in enumerate(self._tables.widths):
            tails = [tail[step, rows] for tail in self._tails]
            layers = self._keys[step, :, :, rows, :stop]
            caches = [_LayerCache(keys, values, tails) for keys, values in layers]
            both = self._velocity(
                x.repeat_interleave(_BRANCHES, dim=0), conditions, step, bias, rope, caches
            )
            conditional, unconditional = both.unflatten(0, (-1, _BRANCHES)).unbind(1)
            x = x + width * ((1 + guidance) * conditional - guidance * unconditional)
        return x

    def _velocity(
        self,
        x: torch.Tensor,
        conditions: torch.Tensor,
        step: int,
        bias: torch.Tensor | None,
        rope: Any,
        caches: Sequence[_LayerCache],
    ) -> torch.Tensor:
        """Evaluates the estimator as `DiT.velocity` does, with a cache for each layer, so that all
        layers share one compiled function.
        """
        net, (blocks, out) = self._estimator, self._tables.modulation[step]
        first = h = net.input_embed(x.transpose(1, 2), conditions, caches[0])
        for layer, modulation, cache in zip(net.transformer_blocks, blocks, caches, strict=True):
            h = layer(h, modulation, rope, bias, cache)
        velocity: torch.Tensor = net.output(net.joined(h, first), out)
        return velocity.float().transpose(1, 2)


def estimator_of(flow: RecomputeFlow) -> tuple[Any, OdeTables]:
    """Returns the estimator of a flow, and the tables of its schedule."""
    solver = flow._solvers[flow._default_steps]
    return solver._estimator, solver.tables


def compile_layers(flow: RecomputeFlow) -> None:
    """Compiles the layers of a flow's estimator in place, one compiled function for all layers."""
    for layer in estimator_of(flow)[0].transformer_blocks:
        layer.compile(dynamic=True)
