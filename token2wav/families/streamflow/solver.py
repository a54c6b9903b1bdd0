"""Solver of StreamFlow's ODE in windows of utterances, under guided attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from token2wav.networks.dit import DiT, LayerBiases
from token2wav.networks.estimator import Rope
from token2wav.networks.masks import guided_biases
from token2wav.networks.ode import OdeState, OdeTables


class GuidedSolver:
    """Solver that integrates windows of utterances on a DiT with guided attention. Thread-safe.

    Args:
        unconditional: (dim,) projected conditions of a frame of an unconditional row.
        velocity: computes the velocity in place of the estimator, see `DiT.velocity`.
    """

    def __init__(
        self,
        estimator: DiT,
        tables: OdeTables,
        unconditional: torch.Tensor,
        velocity: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        assert estimator.guided is not None
        self._unconditional = unconditional
        self._velocity = velocity or estimator.velocity
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

        After every evaluation, the frames that no later evaluation depends on are dropped. If the
        window holds the reach of all evaluations, the result equals the result for the whole
        utterance. In a narrower window, the frames at its edges are computed as if the utterance
        ended there.

        Args:
            noise: (B, bands, T) start of the ODE for windows. A window starts with a block, and
                ends with a block or with its utterance.
            mu: (B, mu_dim, T) condition from the tokens.
            speaker: (B, spk_dim) speaker vectors.
            start: (B,) position of the first frame of each window in its utterance.
            first, last: range of the frames to return, `last` exclusive.
            lengths: (B,) frames of each window; frames behind them are padding. None for windows
                without padding.

        Returns:
            (B, bands, last - first) mel.
        """
        left, evaluations = 0, len(self._tables.modulation)
        positions = start[:, None] + torch.arange(noise.shape[2], device=noise.device)
        state: OdeState = (noise,)
        conditions = self._estimator.project_conditions(mu, speaker, None)
        if self._tables.guidance:
            unconditional = self._unconditional.expand_as(conditions)
            conditions = torch.cat((conditions, unconditional))
        lengths = None if lengths is None else self._tables.rows(lengths)
        frames = 0
        rope: Rope = ()
        biases: LayerBiases = ()
        for evaluation, modulation in enumerate(self._tables.modulation):
            if state[0].shape[2] != frames:  # frames were dropped
                frames = state[0].shape[2]
                rope = self._estimator.rope(self._tables.rows(positions))
                biases = guided_biases(
                    self._attention,
                    frames,
                    self._estimator.block_frames,
                    noise.device,
                    lengths,
                    self._estimator.score_dtype,
                )
            velocity = self._velocity(
                self._tables.rows(state[0]), conditions, modulation, biases, rope=rope
            )
            state = self._tables.advance_state(evaluation, state, velocity)
            rest = evaluations - 1 - evaluation  # number of evaluations still to come
            begin = max(0, first - rest * self._past - left)
            end = min(frames, last + rest * self._future - left)
            state = tuple(part[:, :, begin:end] for part in state)
            conditions, positions = conditions[:, begin:end], positions[:, begin:end]
            left += begin
        return state[0]
