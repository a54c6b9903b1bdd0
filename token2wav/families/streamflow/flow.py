"""Flow stage of models whose attention is bounded on both sides: every chunk in a window of its
own, and nothing kept.

One evaluation of the estimator at a block depends on as many blocks before it as there are backward
layers, and on as many after it as there are forward layers. The ODE evaluates it again and again,
each time on what the time before gave: its solution depends on that many blocks times the number of
steps. A chunk's window, cut by the chunker, holds one evaluation's reach. Cost and memory of a
chunk are the same wherever it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.execution.stages import Encoder, FlowStage, StatefulStage, TokenChunk
from token2wav.model_config import ModelConfig
from token2wav.networks.dit import DiT
from token2wav.networks.grouping import map_grouped
from token2wav.networks.masks import guided_biases
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import OdeTables
from token2wav.voice import Voice


class GuidedSolver:
    """Integrates windows of utterances under the masks of their estimator. It has no state: threads
    may share it.

    Args:
        estimator: a DiT with guided attention.
        tables: of the schedule.
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
        """Noise to the mel of some frames of a window.

        What no later step can make a difference with is left out of every step. In a window that
        holds the reach of all steps the result is that of the whole utterance. In a narrower one
        the frames at its edges go through all steps as if nothing were beyond them.

        Args:
            noise, mu: (B, bands, T) of windows that start with a block and end with one, or with
                their utterance.
            speaker: (B, bands).
            start: (B,) position of each window's first frame in its utterance.
            first, last: frames of the windows that are asked for, `last` exclusive.

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
            rest = steps - 1 - step  # evaluations that are still to come
            begin = max(0, first - rest * self._past - left)
            end = min(x.shape[2], last + rest * self._future - left)
            x, conditions, positions = (
                x[:, :, begin:end],
                conditions[:, begin:end],
                positions[:, begin:end],
            )
            left += begin
        return x


class WindowFlow(StatefulStage[tuple[int, torch.Tensor]], FlowStage):
    """Sliding windows on torch.

    Args:
        config: of the model.
        encoder: of the flow, on the device that is to be used; it keeps nothing of streams.
        noise: of the flow.
        solvers: of the flow's estimator, by number of ODE steps; the usual number comes first.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoder: Encoder,
        noise: FlowNoise,
        solvers: Mapping[int, GuidedSolver],
    ) -> None:
        super().__init__()  # of each stream steps and speaker are kept
        self._encoder = encoder
        self._device = encoder.device
        self._noise = noise.to(self._device)
        self._solvers = dict(solvers)
        self._usual = next(iter(solvers))
        self._ratio = config.token_mel_ratio

    @torch.inference_mode()
    def open(self, voice: Voice, steps: int = 0) -> int:
        return self.register((steps or self._usual, self._speaker(voice)))

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        """Computes chunks; windows of one shape with as many steps run together."""
        return map_grouped(
            batch, lambda each: (self.state(each[0])[0], *_shape(each[1])), self._solve
        )

    @torch.inference_mode()
    def whole(
        self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0
    ) -> torch.Tensor:
        """Mel of a whole utterance in one call, (bands, ratio * tokens); under the layers' masks in
        either case.
        """
        handle = self.open(voice, steps)
        try:
            chunk = TokenChunk(tokens, left=0, start=0, stop=len(tokens), last=True)
            return self._solve([(handle, chunk)])[0]
        finally:
            self.close(handle)

    def _speaker(self, voice: Voice) -> torch.Tensor:
        return self._encoder.speaker(torch.tensor(voice.speaker_embedding, device=self._device))

    def _solve(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        """Mels (bands, frames) of chunks with as many steps, whose windows have one shape."""
        _, left, tokens = _shape(batch[0][1])
        first, last = self._ratio * left, self._ratio * (left + tokens)
        starts = [self._ratio * (chunk.start - chunk.left) for _, chunk in batch]
        # What stands around a chunk in its window has conditions too.
        windows = [
            (None, TokenChunk(chunk.tokens, 0, 0, len(chunk.tokens), last=True))
            for _, chunk in batch
        ]
        mu = torch.stack(self._encoder.encode(windows))
        width = mu.shape[2]
        noise = torch.stack([self._noise.window(start, start + width) for start in starts])
        streams = [self.state(handle) for handle, _ in batch]
        speakers = torch.stack([speaker for _, speaker in streams])
        positions = torch.tensor(starts, device=self._device)
        return list(self._solvers[streams[0][0]].solve(noise, mu, speakers, positions, first, last))


def _shape(chunk: TokenChunk) -> tuple[int, int, int]:
    """Tokens of a chunk's window, those before the chunk, and its own."""
    return len(chunk.tokens), chunk.left, chunk.stop - chunk.start
