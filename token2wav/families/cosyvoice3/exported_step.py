"""Estimator as the step that is exported (`networks/dit_step.py`), which some runtime executes on dense tensors.

Rows of the graph are chunks, for a block's keys and values are not known to other blocks of its chunk before the call.
Keys and values are copied from their pages before every step, and the new ones back into pages after it. That costs one
more reading of the past, and lets streams of any history share a batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution.batch import HEADER, SEEN, START, VALID, Batch
from token2wav.execution.step import StepGraph, Velocity
from token2wav.families.cosyvoice3.steps import DiTStep
from token2wav.networks.dit import DiT
from token2wav.networks.dit_step import CachedStep
from token2wav.networks.masks import attention_bias
from token2wav.networks.ode import OdeTables


class TorchGraph:
    """`CachedStep` on torch, where there is no graph, or none for the shapes of a batch.

    Args:
        estimator: the DiT.
    """

    def __init__(self, estimator: DiT) -> None:
        self._step = CachedStep(estimator)

    @property
    def cache_type(self) -> torch.dtype:
        return self._step.estimator.proj_out.weight.dtype

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return True

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        names = self._step.input_names
        given = [inputs[name] for name in names]
        own = len(names) - 2 * self._step.layers
        results = self._step(*given[:own], tuple(given[own:]))
        for name, result in zip(self._step.output_names, results, strict=True):
            outputs[name].copy_(result)


class ExportedStep(DiTStep):
    """Step function that runs an exported graph.

    Args:
        estimator, tables, cache: see `DiTStep`.
        graph: executes the step; None for torch, which runs all that a graph does not take.
    """

    aligned = True

    def __init__(self, estimator: DiT, tables: OdeTables, cache: PagedKVCache, graph: StepGraph | None = None) -> None:
        super().__init__(estimator, tables, cache)
        self._torch = TorchGraph(self.estimator)
        self._graph = graph or self._torch

    def __call__(self, batch: Batch) -> Velocity:
        size, layout = batch.size, self.cache.layout
        frames, past = size.each * layout.block_frames, size.past * layout.block_frames
        rows, inner = layout.branches * size.rows, layout.heads * layout.dim_head
        taken = self._graph.takes({"x": (rows, layout.bands, frames), "past_key_0": (rows, past, inner)})
        graph = self._graph if taken else self._torch
        given, past_pages, new_pages = self._inputs(batch)
        old, new = (
            torch.empty(
                *(layout.layers, 2, layout.branches, len(pages)),
                *(layout.block_frames, layout.heads, layout.dim_head),
                dtype=graph.cache_type,
                device=self.cache.device,
            )
            for pages in (past_pages, new_pages)
        )
        given |= self._by_layer("past", old, rows)
        x = self._dense(batch.x, size.each)
        outputs = {
            "velocity": torch.empty_like(self.tables.rows(x)),
            "new_contexts": torch.empty(2, rows, *batch.conv_state.shape[-2:], device=self.cache.device),
            **self._by_layer("new", new, rows),
        }

        def velocity(step: int) -> torch.Tensor:
            modulation = self.tables.modulation[step]
            state = batch.conv_state[:, step].permute(1, 2, 0, 3, 4)  # (2, branches, chunks, dim, CONTEXT_FRAMES)
            self.cache.gather(step, past_pages, old)
            of_step = {
                "x": self.tables.rows(self._dense(batch.x, size.each)),
                "modulation": modulation.blocks[:, 0],
                "modulation_out": modulation.out[0],
                "contexts": state.flatten(1, 2),
            }
            graph.run(given | of_step, outputs)
            self.cache.scatter(step, new_pages, new)
            state.copy_(outputs["new_contexts"].view(state.shape))
            return outputs["velocity"].unflatten(2, (size.each, -1)).transpose(1, 2).flatten(0, 1)

        return velocity

    def _inputs(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Inputs that are the same in all steps, pages of the past and pages of the chunks, worked out on the device.

        A frame sees a key if the key's page is in the table of its block and the key is no padding.
        """
        size, table, frames = batch.size, batch.table.long(), batch.block_frames
        count = torch.arange(max(size.pages, size.each * frames), device=table.device)
        valid, seen = (table[:, column].view(size.rows, size.each) for column in (VALID, SEEN))
        pages = table[:, HEADER:].view(size.rows, size.each, size.pages)
        own = pages.gather(2, (seen - 1).clamp(min=0)[..., None]).squeeze(2)
        own = torch.where(valid > 0, own, self.cache.scratch)  # (chunks, each)
        # All that the first block of a chunk sees but itself is of the past.
        past = torch.where(count[: size.past] < seen[:, :1] - 1, pages[:, 0, : size.past], self.cache.null)
        keys = torch.cat((past, own), dim=1)  # (chunks, past + each)
        listed = torch.where(count[: size.pages] < seen[..., None], pages, -1)
        visible = (listed[:, :, None] == keys[:, None, :, None]).any(3)  # (chunks, each, past + each)
        filled = torch.cat((torch.full_like(past, frames), valid), dim=1)  # frames of each page that are no padding
        allowed = visible[..., None] & (count[:frames] < filled[..., None])[:, None]
        bias = attention_bias(allowed.flatten(2)).repeat_interleave(frames, dim=1)[:, None]
        mu, spks, cond = self.tables.conditions(
            self._dense(batch.mu, size.each), batch.speakers[:: size.each], self._dense(batch.cond, size.each)
        )
        starts = table[:: size.each, START]
        cos, sin = self.estimator.rotary_embed(starts[:, None] + count[: size.each * frames])
        of_branches = {"cos": cos, "sin": sin, "bias": bias, "frames": valid.sum(1)}
        inputs = {name: torch.cat([value] * self.cache.layout.branches) for name, value in of_branches.items()}
        inputs |= {"mu": mu, "spks": spks.contiguous(), "cond": cond}
        return inputs, past.flatten(), own.flatten()

    @staticmethod
    def _dense(rows: torch.Tensor, each: int) -> torch.Tensor:
        """(chunks * each, bands, block_frames) to (chunks, bands, each * block_frames), contiguous."""
        return rows.unflatten(0, (-1, each)).transpose(1, 2).flatten(2).contiguous()

    def _by_layer(self, prefix: str, values: torch.Tensor, rows: int) -> dict[str, torch.Tensor]:
        """Views (rows, frames, inner) of (layers, 2, branches, pages, block_frames, heads, dim_head)."""
        inner = self.cache.layout.heads * self.cache.layout.dim_head
        return {
            f"{prefix}_{which}_{layer}": values[layer, kind].reshape(rows, -1, inner)
            for layer in range(self.cache.layout.layers)
            for kind, which in enumerate(("key", "value"))
        }
