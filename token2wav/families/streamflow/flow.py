"""Flow stage of models whose attention is bounded on both sides. It computes every chunk in its own
window, and stores nothing of the past.

In one evaluation of the estimator, a block depends on one earlier block for each backward layer,
and on one later block for each forward layer. The ODE evaluates the estimator once for every step,
each time on the result of the step before. So its solution depends on that number of blocks times
the number of steps. The chunker cuts a window that holds the reach of one evaluation. Cost and
memory of a chunk do not depend on its position.
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
    """Solver that integrates windows of utterances under the masks of their estimator. It has no
    state, so threads may share it.

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

        Every step leaves out the frames that no later step depends on. If the window holds the
        reach of all steps, the result equals that of the whole utterance. In a narrower window the
        frames at its edges go through all steps as if the utterance ended there.

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


class WindowFlow(StatefulStage[tuple[int, torch.Tensor]], FlowStage):
    """Flow stage with sliding windows, on torch.

    Args:
        config: configuration of the model.
        encoder: encoder of the flow, without state; its device is the device of the stage.
        noise: noise of the flow.
        solvers: solvers of the estimator, by number of ODE steps; the usual number comes first.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoder: Encoder,
        noise: FlowNoise,
        solvers: Mapping[int, GuidedSolver],
    ) -> None:
        super().__init__()  # the state of a stream is its number of steps and its speaker vector
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
        """Computes chunks. Windows of the same shape and number of steps run together."""
        return map_grouped(
            batch, lambda each: (self.state(each[0])[0], *_shape(each[1])), self._solve
        )

    @torch.inference_mode()
    def whole(
        self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0
    ) -> torch.Tensor:
        """Computes the mel (bands, ratio * tokens) of a whole utterance in one call, under the
        masks of the layers for either value of `streaming`.
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
        """Computes mels (bands, frames) of chunks with the same shape and number of steps."""
        _, left, tokens = _shape(batch[0][1])
        first, last = self._ratio * left, self._ratio * (left + tokens)
        starts = [self._ratio * (chunk.start - chunk.left) for _, chunk in batch]
        # The context of a chunk in its window needs conditions too.
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
    """Returns the numbers of tokens of a chunk's window, before the chunk, and in the chunk."""
    return len(chunk.tokens), chunk.left, chunk.stop - chunk.start
