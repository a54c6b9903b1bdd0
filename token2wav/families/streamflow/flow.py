"""Flow stage of StreamFlow, whose attention reaches a limited number of blocks to both sides. It
computes every chunk in a window of its own, and stores only the last tokens of a stream.

In one evaluation of the estimator, a block depends on one earlier block for each backward layer,
and on one later block for each forward layer. These blocks are the reach of one evaluation. The ODE
evaluates the estimator once for every step, each time on the result of the step before. The exact
solution therefore depends on the reach times the number of steps. A window holds only the reach of
one evaluation, so that cost and memory of a chunk do not depend on its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.execution.stages import Encoder, EncoderInput, FlowStage, StatefulStage, TokenChunk
from token2wav.model_config import ModelConfig
from token2wav.networks.dit import DiT
from token2wav.networks.grouping import map_grouped
from token2wav.networks.masks import guided_biases
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import OdeTables
from token2wav.networks.staging import joined, to_device
from token2wav.voice import Voice


class GuidedSolver:
    """Euler solver that integrates windows of utterances under guided attention. Thread-safe.

    Args:
        estimator: a DiT with guided attention.
        tables: tables of the schedule.
    """

    def __init__(self, estimator: DiT, tables: OdeTables) -> None:
        assert estimator.guided is not None
        self._estimator = estimator
        self._tables = tables
        self._attention = estimator.guided
        self._past = self._attention.past_blocks * estimator.block_frames
        self._future = self._attention.future_blocks * estimator.block_frames

    @torch.inference_mode()
    def solve(
        self,
        noise: torch.Tensor,
        mu: torch.Tensor,
        speaker: torch.Tensor,
        start: torch.Tensor,
        first: int,
        last: int,
    ) -> torch.Tensor:
        """Integrates noise to the mel of some frames of a window.

        After every step, the frames that no later step depends on are dropped. If the window holds
        the reach of all steps, the result equals the result for the whole utterance. In a narrower
        window, the frames at its edges are computed as if the utterance ended there.

        Args:
            noise: (B, bands, T) start of the ODE for windows. A window starts with a block, and
                ends with a block or with its utterance.
            mu: (B, bands, T) condition from the tokens.
            speaker: (B, bands) speaker vectors.
            start: (B,) position of the first frame of each window in its utterance.
            first, last: range of the frames to return, `last` exclusive.

        Returns:
            (B, bands, last - first) mel.
        """
        left, steps = 0, len(self._tables.modulation)
        x, positions = noise, start[:, None] + torch.arange(noise.shape[2], device=noise.device)
        mu, speaker = self._tables.guided(mu, speaker)
        conditions = self._estimator.prepare_conditions(mu, speaker, None)
        for step, modulation in enumerate(self._tables.modulation):
            rope = self._estimator.rope(self._tables.rows(positions))
            biases = guided_biases(
                self._attention, x.shape[2], self._estimator.block_frames, x.device
            )
            velocity = self._estimator.velocity(
                self._tables.rows(x), conditions, modulation, biases, rope=rope
            )
            x = self._tables.advance(step, x, velocity)
            rest = steps - 1 - step  # number of evaluations still to come
            begin = max(0, first - rest * self._past - left)
            end = min(x.shape[2], last + rest * self._future - left)
            x, conditions, positions = (
                x[:, :, begin:end],
                conditions[:, begin:end],
                positions[:, begin:end],
            )
            left += begin
        return x


@dataclass(eq=False)
class _Stream:
    """State of one stream.

    Attributes:
        steps: number of ODE steps.
        speaker: (bands,) speaker vector.
        past: last tokens before the next chunk, as many as a window needs.
    """

    steps: int
    speaker: torch.Tensor
    past: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class _Window:
    """Chunk of a stream with the tokens around it.

    Attributes:
        stream: stream of the chunk.
        tokens: tokens of the past, of the chunk and of its look-ahead.
        start: position of the first token in the stream.
        left: number of tokens before the chunk.
        count: number of tokens of the chunk.
    """

    stream: _Stream
    tokens: NDArray[np.int32]
    start: int
    left: int
    count: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Key of a batch: windows with equal values run together."""
        return self.stream.steps, len(self.tokens), self.left, self.count


class WindowFlow(StatefulStage[_Stream], FlowStage):
    """Flow stage with sliding windows, on torch.

    Args:
        config: configuration of the model.
        encoder: encoder of the flow, without state. The stage runs on its device.
        noise: noise of the flow.
        solvers: solvers of the estimator, by number of ODE steps; the default number comes first.
        past_tokens: number of tokens that one evaluation of the estimator reaches back before a
            chunk.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoder: Encoder,
        noise: FlowNoise,
        solvers: Mapping[int, GuidedSolver],
        past_tokens: int,
    ) -> None:
        super().__init__()
        self._encoder = encoder
        self._device = encoder.device
        self._noise = noise.to(self._device)
        self._solvers = dict(solvers)
        self._usual = next(iter(solvers))
        self._ratio, self._past_tokens = config.token_mel_ratio, past_tokens
        self._no_tokens = np.empty((0, *config.token_shape), np.int32)

    @torch.inference_mode()
    def open(self, voice: Voice, steps: int = 0) -> int:
        embedding = torch.tensor(voice.speaker_embedding, device=self._device)
        speaker = self._encoder.speaker(embedding)
        return self.register(_Stream(steps or self._usual, speaker, self._no_tokens))

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        """Computes chunks. Windows of the same shape and number of steps run together."""
        windows = [self._window(self.state(handle), chunk) for handle, chunk in batch]
        mels = map_grouped(windows, lambda window: window.shape, self._solve)
        for window in windows:
            computed = window.tokens[: window.left + window.count]
            window.stream.past = computed[max(0, len(computed) - self._past_tokens) :]
        return mels

    @torch.inference_mode()
    def whole(
        self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0
    ) -> torch.Tensor:
        """Computes the mel (bands, ratio * tokens) of a whole utterance in one call.

        `streaming` has no effect, because the masks of the layers are part of the model.
        """
        handle = self.open(voice, steps)
        try:
            [mel] = self.advance([(handle, TokenChunk(tokens, 0, len(tokens), last=True))])
            return mel
        finally:
            self.close(handle)

    @staticmethod
    def _window(stream: _Stream, chunk: TokenChunk) -> _Window:
        tokens, left = np.concatenate((stream.past, chunk.tokens)), len(stream.past)
        return _Window(stream, tokens, chunk.start - left, left, chunk.stop - chunk.start)

    def _solve(self, windows: Sequence[_Window]) -> list[torch.Tensor]:
        """Computes the mels (bands, frames) of the chunks of windows of one shape."""
        steps, width, left, count = windows[0].shape
        # Conditions are needed for the whole window, and not only for the chunk.
        whole = [
            EncoderInput(TokenChunk(window.tokens, 0, width, last=True), None) for window in windows
        ]
        mu = torch.stack(self._encoder.encode(whole))
        starts = [self._ratio * window.start for window in windows]
        frames = self._ratio * width
        noise = torch.stack(joined([self._noise.pieces(start, start + frames) for start in starts]))
        speakers = torch.stack([window.stream.speaker for window in windows])
        positions = to_device(np.array(starts), self._device)
        first, last = self._ratio * left, self._ratio * (left + count)
        return list(self._solvers[steps].solve(noise, mu, speakers, positions, first, last))
