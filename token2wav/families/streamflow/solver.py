"""Solver of StreamFlow's ODE in windows of utterances, under guided attention."""

from __future__ import annotations

import torch

from token2wav.networks.dit import DiT, LayerBiases
from token2wav.networks.estimator import Rope
from token2wav.networks.masks import guided_biases
from token2wav.networks.ode import OdeTables


class GuidedSolver:
    """Euler solver that integrates windows of utterances on a DiT with guided attention.
    Thread-safe.
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
        lengths: torch.Tensor | None = None,
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
            lengths: (B,) frames of each window; frames behind them are padding. None for windows
                without padding.

        Returns:
            (B, bands, last - first) mel.
        """
        left, steps = 0, len(self._tables.modulation)
        x, positions = noise, start[:, None] + torch.arange(noise.shape[2], device=noise.device)
        mu, speaker = self._tables.guided(mu, speaker)
        conditions = self._estimator.project_conditions(mu, speaker, None)
        lengths = None if lengths is None else self._tables.rows(lengths)
        frames = 0
        rope: Rope = ()
        biases: LayerBiases = ()
        for step, modulation in enumerate(self._tables.modulation):
            if x.shape[2] != frames:  # frames were dropped
                frames = x.shape[2]
                rope = self._estimator.rope(self._tables.rows(positions))
                biases = guided_biases(
                    self._attention,
                    frames,
                    self._estimator.block_frames,
                    x.device,
                    lengths,
                    self._estimator.score_dtype,
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
