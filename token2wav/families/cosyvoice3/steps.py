"""Step functions of a DiT, which compute what conditions add to the first layer's input once for all ODE steps."""

from __future__ import annotations

import torch

from token2wav.execution.batch import Batch, frame_positions
from token2wav.execution.step import BlockMemory, StepFunction, Velocity
from token2wav.networks.dit import DiT


class DiTStep(StepFunction):
    """Step function of a DiT, in any way but exported."""

    estimator: DiT

    def of_conditions(self, batch: Batch) -> torch.Tensor:
        """Share of the conditions in the input projection of all steps, (branches, rows, block_frames, dim)."""
        embed = self.estimator.input_embed
        conditional = embed.of_conditions(batch.cond.transpose(1, 2), batch.mu.transpose(1, 2), batch.speakers)
        given = conditional.new_empty(self.cache.layout.branches, *conditional.shape)
        given[0] = conditional
        given[1:] = embed.proj.bias  # without conditions only the bias is left
        return given


class TorchStep(DiTStep):
    """Step function on torch."""

    def __call__(self, batch: Batch) -> Velocity:
        embed, given = self.estimator.input_embed, self.of_conditions(batch)
        rope = self.estimator.rope(self.tables.rows(frame_positions(batch.table, batch.block_frames)))
        memory = BlockMemory(batch, self.cache, self.estimator)

        def velocity(step: int) -> torch.Tensor:
            memory.step = step
            h = (given + embed.of_state(batch.x.transpose(1, 2))).flatten(0, 1)
            return self.estimator.velocity_of(embed.placed(h, memory), self.tables.modulation[step], rope, None, memory)

        return velocity
