"""Step function on an exported estimator, which ONNX Runtime or TensorRT runs on dense tensors.
`CachedStep` in `networks/estimator.py` defines the graph.

A row of the graph is a whole chunk and not a block, because the blocks of a chunk attend to keys
and values that are computed in the same call. Before every ODE step, keys and values are copied
from their pages into dense tensors. After the step the new keys and values are copied back into
pages. The copies cost one more read of the past, and let streams of any length share a batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution.batch import Batch
from token2wav.execution.block_table import HEADER, Column
from token2wav.execution.step import ExportedModule, Velocity, VelocityStep
from token2wav.networks.estimator import (
    MODULATION,
    PRESENT,
    ROPE,
    CachedStep,
    Estimator,
    cache_names,
)
from token2wav.networks.masks import attention_bias
from token2wav.networks.ode import OdeTables


class TorchModule:
    """`CachedStep` on torch. It runs batches that have no exported graph for their shapes."""

    def __init__(self, estimator: Estimator) -> None:
        self._step = CachedStep(estimator)

    @property
    def cache_type(self) -> torch.dtype:
        return self._step.estimator.cache_type

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return True

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        for name, result in self._step(inputs).items():
            outputs[name].copy_(result)


class ExportedStep(VelocityStep):
    """Step function that runs an exported graph. A batch runs on torch if there is no graph, or if
    the graph was not exported for the shapes of the batch.
    """

    aligned = True

    def __init__(
        self,
        estimator: Estimator,
        tables: OdeTables,
        cache: PagedKVCache,
        graph: ExportedModule | None = None,
    ) -> None:
        super().__init__(estimator, tables, cache)
        self._torch = TorchModule(estimator)
        self._graph = graph or self._torch

    def __call__(self, batch: Batch) -> Velocity:
        size, layout = batch.size, self.cache.layout
        frames, past = (
            size.blocks_per_chunk * layout.block_frames,
            size.past_pages * layout.block_frames,
        )
        rows, inner = layout.branches * size.rows, layout.heads * layout.dim_head
        is_exported = self._graph.takes(
            {"x": (rows, layout.bands, frames), "past_key_0": (rows, past, inner)}
        )
        graph = self._graph if is_exported else self._torch
        inputs, past_pages, new_pages = self._inputs(batch)
        old, new = (
            torch.empty(
                *(layout.layers, 2, layout.branches, len(pages)),
                *(layout.block_frames, layout.heads, layout.dim_head),
                dtype=graph.cache_type,
                device=self.cache.device,
            )
            for pages in (past_pages, new_pages)
        )
        inputs |= self._by_layer("past", old, rows)
        x = self.tables.rows(self._dense(batch.x, size.blocks_per_chunk))
        outputs = {
            "velocity": torch.empty_like(x),
            "new_conv_state": torch.empty(
                rows, batch.conv_state.shape[-1], device=self.cache.device
            ),
            **self._by_layer("new", new, rows),
        }

        def velocity(step: int) -> torch.Tensor:
            stored = self.tables.stored_steps[step]
            conv_state = batch.conv_state[:, stored].transpose(0, 1)  # (branches, chunks, width)
            self.cache.gather(stored, past_pages, old)
            step_inputs = {
                "x": self.tables.rows(self._dense(batch.x, size.blocks_per_chunk)),
                "conv_state": conv_state.flatten(0, 1).contiguous(),
                **dict(zip(MODULATION, self.tables.modulation[step], strict=False)),
            }
            graph.run(inputs | step_inputs, outputs)
            self.cache.scatter(stored, new_pages, new, batch.table[:, Column.VALID])
            conv_state.copy_(outputs["new_conv_state"].view(conv_state.shape))
            return (
                outputs["velocity"]
                .unflatten(2, (size.blocks_per_chunk, -1))
                .transpose(1, 2)
                .flatten(0, 1)
            )

        return velocity

    def _inputs(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Computes the inputs that are the same in all ODE steps, on the device.

        The block tables become an attention bias. A frame attends to a key if the page of the key
        is in the block table of the frame, and the key is not padding.

        Returns:
            Inputs by name, pages of the past, and pages of the chunks.
        """
        size, table, frames = batch.size, batch.table.long(), batch.block_frames
        count = torch.arange(max(size.pages, size.blocks_per_chunk * frames), device=table.device)
        valid, causal, visible = (
            table[:, column].view(size.rows, size.blocks_per_chunk)
            for column in (Column.VALID, Column.NUM_CAUSAL_PAGES, Column.NUM_PAGES)
        )
        pages = table[:, HEADER:].view(size.rows, size.blocks_per_chunk, size.pages)
        # (chunks, 1)
        starts, prompt_padding = (
            table[:: size.blocks_per_chunk, column, None]
            for column in (Column.START, Column.PROMPT_PADDING)
        )
        chunk_pages = pages.gather(2, (causal - 1).clamp(min=0)[..., None]).squeeze(2)
        chunk_pages = torch.where(valid > 0, chunk_pages, self.cache.scratch)  # (chunks, blocks)
        # All pages of the first block of a chunk, except its own, belong to the past.
        past = torch.where(
            count[: size.past_pages] < causal[:, :1] - 1,
            pages[:, 0, : size.past_pages],
            self.cache.null,
        )
        keys = torch.cat((past, chunk_pages), dim=1)  # (chunks, past + blocks)
        table_pages = torch.where(count[: size.pages] < visible[..., None], pages, -1)
        # (chunks, blocks, past + blocks)
        sees = (table_pages[:, :, None] == keys[:, None, :, None]).any(3)
        # Valid frames of each page: neither prompt padding before them nor padding after them.
        first = torch.where(keys == pages[:, 0, :1], prompt_padding, 0)
        stop = torch.cat((torch.full_like(past, frames), valid), dim=1)
        key_mask = (count[:frames] >= first[..., None]) & (count[:frames] < stop[..., None])
        allowed = sees[..., None] & key_mask[:, None]
        bias = attention_bias(allowed.flatten(2)).repeat_interleave(frames, dim=1)[:, None]
        mu, spks, cond = self.tables.guided(
            self._dense(batch.mu, size.blocks_per_chunk),
            batch.speakers[:: size.blocks_per_chunk],
            self._dense(batch.cond, size.blocks_per_chunk),
        )
        positions = starts + count[: size.blocks_per_chunk * frames]
        branch_inputs = {"bias": bias, "frames": valid.sum(1)}
        branch_inputs |= zip(ROPE, self.estimator.rope(positions), strict=False)
        if self.estimator.masks_padding:
            branch_inputs[PRESENT] = (positions >= prompt_padding).float()[:, None]
        inputs = {
            name: torch.cat([value] * self.cache.layout.branches)
            for name, value in branch_inputs.items()
        }
        inputs |= {"mu": mu, "spks": spks.contiguous(), "cond": cond}
        return inputs, past.flatten(), chunk_pages.flatten()

    @staticmethod
    def _dense(rows: torch.Tensor, blocks_per_chunk: int) -> torch.Tensor:
        """Reshapes (chunks * blocks, bands, block_frames) to (chunks, bands, blocks *
        block_frames), contiguous.
        """
        return rows.unflatten(0, (-1, blocks_per_chunk)).transpose(1, 2).flatten(2).contiguous()

    def _by_layer(self, prefix: str, values: torch.Tensor, rows: int) -> dict[str, torch.Tensor]:
        """Splits keys and values of all layers into tensors with the names of the graph.

        Args:
            values: (layers, 2, branches, pages, block_frames, heads, dim_head).

        Returns:
            Views (rows, frames, inner), by name.
        """
        inner = self.cache.layout.heads * self.cache.layout.dim_head
        views = (
            values[layer, kind] for layer in range(self.cache.layout.layers) for kind in range(2)
        )
        names = cache_names(self.cache.layout.layers)
        return {
            f"{prefix}_{name}": view.reshape(rows, -1, inner)
            for name, view in zip(names, views, strict=True)
        }
