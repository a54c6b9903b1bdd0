"""Step functions, which evaluate the estimator on a batch at every ODE step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution.batch import Batch
from token2wav.execution.block_table import Block, frame_positions
from token2wav.execution.chunk_attention import chunk_attention
from token2wav.execution.step_boundary import step_boundary
from token2wav.networks.estimator import Attend, Convolution, Estimator
from token2wav.networks.ode import OdeTables

Velocity = Callable[[int], torch.Tensor]

# Visible frames from which one call for all blocks of a chunk is faster than a call for each block
# on a CPU. At 500 frames both took the same time; at 5,900 one call took 0.75 of it.
_LONG_PAST = 1000


class StepFunction(ABC):
    """Integrates batches from noise to mel. Several threads may share one step function. The
    estimator is on the device of the cache.
    """

    aligned = False  # whether all chunks of a batch must have room for the same number of blocks

    def __init__(self, estimator: Estimator, tables: OdeTables, cache: PagedKVCache) -> None:
        self.estimator = estimator
        self.tables = tables
        self.cache = cache

    @abstractmethod
    def integrate(self, batch: Batch) -> None:
        """Integrates the state of a batch, in place, from noise to mel.

        It also writes the keys and values of the blocks to the cache, and the convolution states to
        `conv_state` of the batch. Between two ODE steps it calls `step_boundary`.
        """


class VelocityStep(StepFunction):
    """Step function that returns velocities. torch computes guidance and Euler steps."""

    @abstractmethod
    def __call__(self, batch: Batch) -> Velocity:
        """Computes everything that all ODE steps of a batch share.

        Returns:
            Function that evaluates the estimator. Its argument is the index of an ODE step. Its
            result is the velocity (branches * rows, bands, frames) of the first frames of every
            block, with the conditional rows first. Call it for every step in order.
        """

    @torch.inference_mode()
    def integrate(self, batch: Batch) -> None:
        velocity = self(batch)
        for step in range(len(self.tables.widths)):
            if step:
                step_boundary()
            velocities = velocity(step)
            x = batch.x[..., : velocities.shape[-1]]
            x.copy_(self.tables.advance(step, x, velocities))


# Class of a step function, which takes the estimators of one family.
StepMaker = Callable[[Any, OdeTables, PagedKVCache], StepFunction]


class ExportedModule(Protocol):
    """Exported network on another backend. Its inputs and outputs are torch tensors."""

    @property
    def cache_type(self) -> torch.dtype:
        """dtype of the keys and values among its inputs and outputs."""

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns whether the network was exported for inputs of these shapes."""

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Evaluates the network once.

        Args:
            inputs: tensors by their names in the exported graph, contiguous, on the device of the
                backend.
            outputs: tensors that the results are written to, in the same form as the inputs.
        """


class TorchStep(VelocityStep):
    """Step function on torch.

    If every chunk of a batch has one block, the estimator computes only the frames of the longest
    block. Most provisional chunks have one block.
    """

    def __call__(self, batch: Batch) -> Velocity:
        frames = max(block.valid for block in batch.blocks)
        if any(block.before for block in batch.blocks):
            frames = batch.block_frames
        mu, cond, state = (value[..., :frames] for value in (batch.mu, batch.cond, batch.x))
        conditions = self.estimator.project_conditions(
            *self.tables.guided(mu, batch.speakers, cond)
        )
        rope = self.estimator.rope(self.tables.rows(frame_positions(batch.table, frames)))
        context = EagerContext(batch, self.cache, self.estimator, frames)

        def velocity(step: int) -> torch.Tensor:
            context.step = self.tables.stored_steps[step]
            x, modulation = self.tables.rows(state), self.tables.modulation[step]
            return self.estimator.velocity(x, conditions, modulation, None, context, rope=rope)

        return velocity


class EagerContext:
    """`AttentionContext` on torch. Attention reads keys and values from the cache in place.

    All other layers run on all blocks at once. Attention runs block by block, or on a CPU chunk by
    chunk if a chunk has a long past. One call for several streams would need a copy of all keys and
    values in one tensor, which costs more than the separate calls.

    Args:
        frames: frames of every block that are computed: the length of a block, if any chunk has
            more than one.

    Attributes:
        step: index of the stored state of the current ODE step.
    """

    def __init__(
        self, batch: Batch, cache: PagedKVCache, estimator: Estimator, frames: int
    ) -> None:
        self.step = 0
        self._cache = cache
        self._branches, self._frames = cache.layout.branches, frames
        self._new_pages = cache.index([block.pages[-1] for block in batch.blocks])
        self._valid = torch.tensor([block.valid for block in batch.blocks], device=cache.device)
        self._reads = [
            (cache.index(pages), spans)
            for pages, spans in _read_together(batch.blocks, batch.block_frames)
        ]
        ends = [(row, block) for row, block in enumerate(batch.blocks) if block.last]
        # For every chunk: convolution states, rows of its blocks, and the counts of its frames and
        # of padding frames among them.
        self._chunks = [
            (
                estimator.tails(state),  # each (steps, branches, channels, positions)
                slice(row - block.before // self._frames, row + 1),
                block.before + block.valid,
                max(0, block.prompt_padding - block.start + block.before),
            )
            for state, (row, block) in zip(batch.conv_state, ends, strict=False)
        ]

    def convolve(self, index: int, conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (self._branches, -1))  # (branches, blocks, channels, frames)
        windows = []
        for tails, blocks, frames, prompt_padding in self._chunks:
            state = tails[index][self.step]
            reach = state.shape[2]
            extended = torch.cat((state, x[:, blocks].transpose(1, 2).flatten(2)), dim=2)
            if prompt_padding:
                extended[..., reach : reach + prompt_padding] = 0
            state.copy_(extended[..., frames : frames + reach])
            windows.append(extended.unfold(2, reach + self._frames, self._frames).transpose(1, 2))
        return conv(torch.cat(windows, dim=1).flatten(0, 1))

    def attend(
        self,
        layer: int,
        attend: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The keys and values of the present blocks are read back from the cache. A frame therefore
        attends to the same rounded values, whether a key belongs to its own chunk or to an earlier
        chunk.
        """
        # (branches, blocks, frames, inner)
        q, k, v = (value.unflatten(0, (self._branches, -1)) for value in (q, k, v))
        view = self._cache.layer(self.step, layer)
        view.write(self._new_pages, k, v, self._valid)
        results, block = [], 0
        for pages, spans in self._reads:
            k, v = view.read(pages, spans[-1].stop, q.dtype)
            queries = q[:, block : block + len(spans)]
            block += len(spans)
            if q.is_cpu and len(spans) > 1 and spans[0].stop >= _LONG_PAST:
                visible = [span.stop - span.start for span in spans]
                k, v = k[:, spans[0].start :], v[:, spans[0].start :]
                heads = self._cache.layout.heads
                results.append(chunk_attention(queries, k, v, visible, heads))
            else:
                results += [
                    attend(queries[:, row], k[:, span], v[:, span], None)[:, None]
                    for row, span in enumerate(spans)
                ]
        return torch.cat(results, dim=1).flatten(0, 1)


def _read_together(
    blocks: Sequence[Block], block_frames: int
) -> list[tuple[list[int], list[slice]]]:
    """Groups blocks that can share one read of the cache.

    A block of a chunk usually attends to the pages of the block before it and to its own page, so
    one read serves both blocks. Two blocks cannot share a read if a window of past blocks moves on
    between them. Under full prompt attention all blocks of a chunk attend to the same pages.

    Returns:
        For each group the pages to read, and for each block in the group the frame span that it
        attends to. The span leaves out padding.
    """
    reads: list[tuple[list[int], list[slice]]] = []
    for block in blocks:
        pages = block.chunk_pages or block.pages  # with chunk pages all blocks are full
        span = slice(block.prompt_padding, (len(pages) - 1) * block_frames + block.valid)
        if block.before and reads[-1][0] in (pages, pages[:-1]):
            reads[-1] = pages, [*reads[-1][1], span]
        else:
            reads.append((pages, [span]))
    return reads
