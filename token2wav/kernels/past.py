"""Past of the streams of a batch, as the kernels of estimators without rotary positions read it."""

from __future__ import annotations

import torch

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution.batch import Batch
from token2wav.kernels.attention import paged_attention
from token2wav.kernels.norms import NormVectors
from token2wav.kernels.products import project_heads
from token2wav.networks.estimator import Estimator


class Past:
    """Keys, values and convolution states of a batch, at one ODE step after another.

    Args:
        estimator: has no rotary positions.

    Attributes:
        states: state (chunks, branches, channels, positions) of each convolution at the current ODE
            step.
    """

    def __init__(self, batch: Batch, cache: PagedKVCache, estimator: Estimator) -> None:
        self.table = batch.table
        self.states: list[torch.Tensor] = []
        self._step = 0
        self._batch, self._cache, self._estimator = batch, cache, estimator
        # The kernels of attention rotate the first head. Angles of zero leave it as it is.
        shape = len(batch.table), batch.block_frames, cache.layout.dim_head
        self._cos = torch.ones(shape, device=cache.device)
        self._sin = torch.zeros(shape, device=cache.device)

    def move_to(self, step: int) -> None:
        """Moves to an ODE step."""
        self._step = step
        self.states = self._estimator.tails(self._batch.conv_state[:, step])

    def project_and_attend(
        self,
        x: torch.Tensor,
        projections: tuple[torch.Tensor, torch.Tensor | None],
        layer: int,
        norms: tuple[NormVectors, NormVectors] | None = None,
    ) -> torch.Tensor:
        """Projects x to queries, keys and values, stores keys and values in their pages, and
        computes attention over all pages.

        Args:
            x: (branches * blocks, block_frames, inputs) in the dtype of the weights, contiguous.
            projections: weight (3 * heads * dim_head, inputs) and bias.
            norms: norms of the heads of queries and keys, see `project_heads`.

        Returns:
            (branches * blocks, block_frames, heads * dim_head), zeros in padding.
        """
        view = self._cache.layer(self._step, layer)
        queries = project_heads(x, projections, view, self._cos, self._sin, self.table, norms)
        return paged_attention(queries, view, self._cos, self._sin, self.table)
