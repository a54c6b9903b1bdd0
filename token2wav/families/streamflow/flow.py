"""Flow stage of StreamFlow, whose attention reaches a limited number of blocks to both sides. It
computes every chunk in a window of its own, and stores only the last tokens of a stream.

In one evaluation of the estimator, a block depends on one earlier block for each backward layer,
and on one later block for each forward layer. These blocks are the reach of one evaluation. The ODE
evaluates the estimator once for every step, each time on the result of the step before. The exact
solution therefore depends on the reach times the number of steps. A window holds only the reach of
one evaluation, so that cost and memory of a chunk do not depend on its position.

On a GPU every window of a stream runs in a CUDA graph. All graphs have room for the longest window,
because first and last windows are short, but rare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.config.model_config import ModelConfig
from token2wav.execution.buckets import BucketRunner, PaddedSize, map_grouped
from token2wav.execution.captured_sizes import CAPTURED_WINDOWS
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.staging import joined, to_device
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.streamflow.solver import GuidedSolver
from token2wav.families.streamflow.window_batch import Window, WindowBatch, size_of
from token2wav.networks.noise import FlowNoise
from token2wav.stages.stage import (
    DEFAULT_OPTIONS,
    EncoderInput,
    FlowStage,
    StreamOptions,
    TokenChunk,
)
from token2wav.voice import Voice


@dataclass(eq=False)
class _WindowStream:
    """State of one stream."""

    steps: int  # ODE steps
    speaker: torch.Tensor  # (speaker channels,) speaker vector
    past: NDArray[np.int32]  # last tokens before the next chunk, as many as a window needs


class WindowFlow(FlowStage[_WindowStream]):
    """Flow stage with sliding windows, on torch.

    Args:
        encoder: encoder of the flow, without state. The stage runs on its device.
        solvers: solvers of the estimator, by number of ODE steps; the default number comes first.
        past_tokens: tokens before a chunk that one evaluation of the estimator reaches back to.
        graphs: memory pool of the CUDA graphs; None to run eagerly, in batches of windows of one
            shape.
        longest_hop: tokens of the longest chunk that the graphs have room for.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoder: Flow,
        noise: FlowNoise,
        solvers: Mapping[int, GuidedSolver],
        past_tokens: int,
        *,
        graphs: GraphPool | None = None,
        longest_hop: int = 0,
    ) -> None:
        super().__init__()
        self._encoder = encoder
        self._device = encoder.device
        self._noise = noise.to(self._device)
        self._solvers = dict(solvers)
        self._usual = next(iter(solvers))
        self._ratio, self._past_tokens = config.token_mel_ratio, past_tokens
        self._no_tokens = config.tokens.zeros(0)
        longest = past_tokens + longest_hop + config.lookahead_tokens
        sizes = [PaddedSize(longest, rows) for rows in CAPTURED_WINDOWS]
        self._batches: dict[int, BucketRunner[PaddedSize, Window]] = {}
        if graphs is not None:
            with torch.inference_mode():
                self._batches = {
                    steps: BucketRunner(
                        size_of,
                        partial(WindowBatch, encoder=encoder, noise=self._noise, solver=solver),
                        sizes,
                        graphs,
                    )
                    for steps, solver in solvers.items()
                }

    @torch.inference_mode()
    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        embedding = torch.tensor(voice.speaker_embedding, device=self._device)
        speaker = self._encoder.speaker(embedding)
        steps = options.steps or self._usual
        return self.register(_WindowStream(steps, speaker, self._no_tokens))

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        """Computes chunks. Eager windows of the same shape and number of steps run together. In
        graphs, windows of any shape run together.
        """
        streams = [self.state(handle) for handle, _ in batch]
        windows = [
            _window(stream, chunk) for stream, (_, chunk) in zip(streams, batch, strict=True)
        ]
        mels = (
            map_grouped(
                windows,
                lambda window: window.steps,
                lambda group: self._batches[group[0].steps].run(group),
            )
            if self._batches
            else map_grouped(windows, lambda window: window.shape, self._solve)
        )
        for stream, window in zip(streams, windows, strict=True):
            computed = window.tokens[: window.left + window.count]
            stream.past = computed[max(0, len(computed) - self._past_tokens) :]
        return mels

    @torch.inference_mode()
    def whole(
        self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0
    ) -> torch.Tensor:
        """Computes the mel (bands, ratio * tokens) of a whole utterance in one call.

        `streaming` has no effect, because the masks of the layers are part of the model.
        """
        handle = self.open(voice, StreamOptions(steps))
        try:
            [mel] = self.advance([(handle, TokenChunk(tokens, 0, len(tokens), last=True))])
            return mel
        finally:
            self.close(handle)

    def _solve(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """Computes the mels (bands, frames) of the chunks of windows of one shape."""
        steps, width, left, count = windows[0].shape
        # mu is needed for the whole window, and not only for the chunk.
        inputs = [
            EncoderInput(TokenChunk(window.tokens, 0, width, last=True), None) for window in windows
        ]
        mu = torch.stack(self._encoder.encode(inputs))
        starts = [self._ratio * window.start for window in windows]
        frames = self._ratio * width
        noise = torch.stack(joined([self._noise.pieces(start, start + frames) for start in starts]))
        speakers = torch.stack([window.speaker for window in windows])
        positions = to_device(np.array(starts), self._device)
        first, last = self._ratio * left, self._ratio * (left + count)
        return list(self._solvers[steps].solve(noise, mu, speakers, positions, first, last))


def _window(stream: _WindowStream, chunk: TokenChunk) -> Window:
    tokens, left = np.concatenate((stream.past, chunk.tokens)), len(stream.past)
    start, count = chunk.start - left, chunk.stop - chunk.start
    return Window(stream.steps, stream.speaker, tokens, start, left, count)
