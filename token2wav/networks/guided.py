"""The flow under block-wise guided attention: masks of its layers, and the ODE in a window that is as wide as needed.

One evaluation of the estimator at a block depends on as many blocks before it as there are backward layers, and on as
many after it as there are forward layers. The ODE evaluates it again and again, each time on what the time before gave:
its solution depends on that many blocks times the number of steps.
"""

from __future__ import annotations

import torch

from token2wav.networks.configs import SEES, GuidedAttention, Mask
from token2wav.networks.dit import DiT
from token2wav.networks.masks import attention_bias
from token2wav.networks.ode import OdeTables


def guided_mask(mask: Mask, frames: int, block_frames: int, device: torch.device | None = None) -> torch.Tensor:
    """Mask of a layer: (frames, frames) bool, rows are queries. The first frame starts a block."""
    block = torch.arange(frames, device=device) // block_frames
    before, after = SEES[mask]
    distance = block[None, :] - block[:, None]
    return (distance >= -before) & (distance <= after)


def guided_biases(
    attention: GuidedAttention, frames: int, block_frames: int, device: torch.device | None = None
) -> tuple[torch.Tensor, ...]:
    """Biases of the attention scores of every layer, each (frames, frames)."""
    biases = {mask: attention_bias(guided_mask(mask, frames, block_frames, device)) for mask in set(attention.layers)}
    return tuple(biases[mask] for mask in attention.layers)


class GuidedSolver:
    """Integrates windows of utterances under the masks of their estimator. It has no state: threads may share it.

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
        self, noise: torch.Tensor, mu: torch.Tensor, speaker: torch.Tensor, start: torch.Tensor, first: int, last: int
    ) -> torch.Tensor:
        """Noise to the mel of some frames of a window.

        What no later step can make a difference with is left out of every step. In a window that holds the reach of all
        steps the result is that of the whole utterance. In a narrower one the frames at its edges go through all steps
        as if nothing were beyond them.

        Args:
            noise, mu: (B, bands, T) of windows that start with a block and end with one, or with their utterance.
            speaker: (B, bands).
            start: (B,) position of each window's first frame in its utterance.
            first, last: frames of the windows that are asked for, `last` exclusive.

        Returns:
            (B, bands, last - first) mel.
        """
        left, steps = 0, len(self._tables.modulation)
        x, positions = noise, start[:, None] + torch.arange(noise.shape[2], device=noise.device)
        mu, speaker = self._tables.conditions(mu, speaker)
        for step, modulation in enumerate(self._tables.modulation):
            rope = self._estimator.rotary_embed(self._tables.rows(positions))
            biases = guided_biases(self._attention, x.shape[2], self._estimator.block_frames, x.device)
            velocity = self._estimator.velocity(self._tables.rows(x), mu, speaker, None, modulation, rope, biases)
            x = self._tables.advance(step, x, velocity)
            rest = steps - 1 - step  # evaluations that are still to come
            begin = max(0, first - rest * self._past - left)
            end = min(x.shape[2], last + rest * self._future - left)
            x, mu, positions = x[:, :, begin:end], mu[:, :, begin:end], positions[:, begin:end]
            left += begin
        return x
