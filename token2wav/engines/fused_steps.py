"""The estimator on Triton-language kernels, for CUDA graphs: five launches a layer beside its four matrix products.

The arithmetic is that of `DiT.velocity`. What is fused is what torch would write out and read again: gate, sum, norm
and modulation; rotation, rounding and storing of keys and values; all that attention would copy to find its past.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from token2wav.engines.paged_batch import PagedBatch
from token2wav.flow.cache import KeyValueStore
from token2wav.flow.dit import DiT, DiTBlock
from token2wav.flow.solver import OdeTables
from token2wav.kernels import chunk_table
from token2wav.kernels.attention import paged_attention
from token2wav.kernels.cache_writes import store_keys_values
from token2wav.kernels.norms import gated_norm, modulated_norm
from token2wav.kernels.position_convolution import PositionConvolution


class FusedEstimator:
    """What batches of all shapes share: weights, and the vectors of every ODE time.

    Args:
        estimator: the DiT; its weights are used, not copied.
        tables: of the schedule.
        store: memory of all pages.
        left_blocks: blocks of the past that stay visible beside the prompt's; negative for all.
    """

    def __init__(self, estimator: DiT, tables: OdeTables, store: KeyValueStore, left_blocks: int) -> None:
        self.tables = tables
        self.store = store
        self.left_blocks = left_blocks
        self.estimator = estimator
        self.blocks: list[DiTBlock] = list(estimator.transformer_blocks)  # type: ignore[arg-type]
        self.projections = [block.attn.projections() for block in self.blocks]
        positions = estimator.input_embed.conv_pos_embed
        self.convolutions = [PositionConvolution(conv[0]) for conv in (positions.conv1, positions.conv2)]  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class _Fixed:
    """What is the same in all steps of a chunk.

    Attributes:
        cos, sin: (streams, N, dim_head) rotary angles.
        rows: (branches, streams, N, dim) what the conditions add to the input projection.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor


class FusedSteps:
    """See `Steps`. Steps run in order, from the first.

    Args:
        batch: whose tensors are used.
        shared: by all batches.
    """

    def __init__(self, batch: PagedBatch, shared: FusedEstimator) -> None:
        self._batch = batch
        self._shared = shared
        self._streams = batch.shape.streams
        weight = shared.estimator.input_embed.proj.weight
        bands = batch.mu.shape[1]
        self._of_state, self._of_conditions = weight.split((bands, weight.shape[1] - bands), dim=1)
        self._fixed: _Fixed | None = None

    def __call__(self, step: int) -> torch.Tensor:
        if step == 0:
            self._fixed = self._fix()
        fixed = self._fixed
        assert fixed is not None
        if step == len(self._shared.tables.widths) - 1:
            self._fixed = None  # graphs that are captured later find its memory free
        estimator, modulation = self._shared.estimator, self._shared.tables.modulation[step]
        x = self._embedded(step, fixed)
        # Shift, scale and gate of attention, then of the feed-forward, of every layer; scale and shift of the output.
        vectors = [row[0].unbind() for row in modulation.blocks]
        out_scale, out_shift = modulation.out[0].unbind()
        following = [(shift, scale) for shift, scale, *_ in vectors[1:]] + [(out_shift, out_scale)]

        h = modulated_norm(x, vectors[0][0], vectors[0][1], estimator.proj_out.weight.dtype)
        for layer, block in enumerate(self._shared.blocks):
            _, _, gate_att, shift_ff, scale_ff, gate_ff = vectors[layer]
            h = gated_norm(x, self._attended(step, layer, block, h, fixed), gate_att, shift_ff, scale_ff)
            h = gated_norm(x, block.ff(h), gate_ff, *following[layer])
        return estimator.proj_out(h).float().transpose(1, 2)

    def _fix(self) -> _Fixed:
        batch, estimator = self._batch, self._shared.estimator
        frames = batch.mu.shape[2]
        speakers = batch.speakers[:, None].expand(-1, frames, -1)
        conditions = torch.cat((batch.cond.transpose(1, 2), batch.mu.transpose(1, 2), speakers), dim=2)
        bias = estimator.input_embed.proj.bias
        conditional = F.linear(conditions, self._of_conditions, bias)
        # Without conditions only the bias is left.
        rows = conditional.new_empty(self._shared.store.layout.branches, *conditional.shape)
        rows[0] = conditional
        rows[1:] = bias
        cos, sin = estimator.rotary_embed(chunk_table.positions(batch.table, frames))
        return _Fixed(cos, sin, rows)

    def _embedded(self, step: int, fixed: _Fixed) -> torch.Tensor:
        """(R, N, dim) what goes into the first layer."""
        state = self._batch.x[: self._streams].transpose(1, 2)  # guided and unguided rows have one state
        h = (fixed.rows + F.linear(state, self._of_state)).flatten(0, 1)
        placed = h
        for index, convolution in enumerate(self._shared.convolutions):
            before, after = (
                contexts[:, step, index] for contexts in (self._batch.contexts, self._batch.contexts_after)
            )
            placed = convolution(placed, before, after, self._batch.table)
        return h.add_(placed)

    def _attended(self, step: int, layer: int, block: DiTBlock, h: torch.Tensor, fixed: _Fixed) -> torch.Tensor:
        """(R, N, dim) what attention adds to the residual stream."""
        shared, table = self._shared, self._batch.table
        pages = shared.store.layer(step, layer)
        qkv = F.linear(h, *shared.projections[layer])
        store_keys_values(qkv, pages, fixed.cos, fixed.sin, table)
        seen = paged_attention(qkv, pages, fixed.cos, fixed.sin, table, shared.left_blocks)
        return block.attn.to_out[0](seen)
