"""Runners of the encoder, a part of the flow stage.

`ChunkEncoderRunner` encodes chunk by chunk, which is as fast on a CPU, and reads the keys of a
stream in place. `BlockEncoderRunner` encodes a batch of blocks of any streams, in tensors that a
CUDA graph can capture. Its launches do not grow with the number of streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.cache.encoder_cache import EncoderCache, EncoderContext
from token2wav.cache.states import StateRows, StateStore
from token2wav.config.block_grid import BlockGrid
from token2wav.execution.batch import BatchSize
from token2wav.execution.block_table import HEADER, ChunkPlace, Column, slots_of, write_table
from token2wav.execution.buckets import BucketRunner
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.staging import IntegerTensors, to_device
from token2wav.layers.streaming import Activation, Streaming, StreamStep
from token2wav.networks.conformer import LayerAttention, RelativeAttention, frequencies
from token2wav.stages.stage import Encoder, EncoderInput, TokenChunk

ENCODER = "encoder"  # name of the encoder in the state store


@dataclass(frozen=True, eq=False)
class PlacedChunk:
    """Chunk of a stream or of a prompt, with its block grid and place, both in tokens."""

    chunk: TokenChunk
    grid: BlockGrid
    place: ChunkPlace

    @classmethod
    def of(
        cls, chunk: TokenChunk, grid: BlockGrid, slot: int, tables: list[list[int]]
    ) -> PlacedChunk:
        padding = 0 if chunk.start else grid.prompt_padding
        place = ChunkPlace(
            start=chunk.start + grid.prompt_padding - padding,
            length=padding + chunk.stop - chunk.start,
            tables=tables,
            slot=slot,
            provisional=chunk.provisional,
            prompt_padding=grid.prompt_padding,
            full_prompt_attention=grid.full_prompt_attention and chunk.start < grid.prefix,
        )
        return cls(chunk, grid, place)


class EncoderRunner(ABC):
    """Computes mu of chunks, and stores the encoder's states, keys and values."""

    def __init__(self, encoder: Encoder, cache: EncoderCache, states: StateStore) -> None:
        self.encoder = encoder
        self.cache = cache
        self.states = states

    @abstractmethod
    def run(self, chunks: Sequence[PlacedChunk]) -> list[torch.Tensor]:
        """Returns mu (bands, frames) of each chunk; no chunk affects another chunk."""


class ChunkEncoderRunner(EncoderRunner):
    """Runner that encodes chunk by chunk, on any device and number of threads."""

    @torch.inference_mode()
    def run(self, chunks: Sequence[PlacedChunk]) -> list[torch.Tensor]:
        rows = self.states.rows(ENCODER, len(chunks))
        before, after = to_device(
            slots_of([placed.place for placed in chunks], len(chunks)), self.encoder.device
        )
        self.states.read(before, rows)
        mus = self.encoder.encode([self._input(chunk) for chunk in chunks], rows.views)
        self.states.write(after, rows)
        return mus

    def _input(self, placed: PlacedChunk) -> EncoderInput:
        chunk, grid, count = placed.chunk, placed.grid, placed.chunk.stop - placed.chunk.start
        context = EncoderContext(self.cache, grid, chunk.start, count, placed.place.tables)
        return EncoderInput(chunk, grid, context)


class BlockEncoderRunner(EncoderRunner):
    """Runner that encodes batches of blocks, eagerly or in buckets.

    `BucketRunner` describes the arguments `buckets` and `graphs`.
    """

    def __init__(
        self,
        encoder: Encoder,
        cache: EncoderCache,
        states: StateStore,
        block_tokens: int,
        buckets: Sequence[BatchSize] = (),
        graphs: GraphPool | None = None,
    ) -> None:
        super().__init__(encoder, cache, states)
        self._block_tokens = block_tokens
        with torch.inference_mode():
            self._batches = BucketRunner(_size_of, self._make, buckets, graphs)

    @torch.inference_mode()
    def run(self, chunks: Sequence[PlacedChunk]) -> list[torch.Tensor]:
        return self._batches.run(chunks)

    def _make(self, size: BatchSize) -> EncoderBatch:
        rows = self.states.rows(ENCODER, size.rows)
        return EncoderBatch(size, self.encoder, self.cache, self.states, rows, self._block_tokens)


def _size_of(chunks: Sequence[PlacedChunk]) -> BatchSize:
    return BatchSize.of([placed.place for placed in chunks], aligned=False)


class EncoderBatch:
    """Tensors of one size for the encoder, which stay at their addresses and are filled anew for
    every batch. A row holds one block.

    Attributes:
        table: (rows, columns) int32 block table, in tokens.
        tokens: (rows, block_tokens + look-ahead, ...) int32 tokens of the blocks and after them; -1
            where there is no token.
        mu: (rows, bands, frames).
    """

    def __init__(
        self,
        size: BatchSize,
        encoder: Encoder,
        cache: EncoderCache,
        states: StateStore,
        rows: StateRows,
        block_tokens: int,
    ) -> None:
        self._encoder, self._cache, self._states, self._rows = encoder, cache, states, rows
        self._block_tokens, device = block_tokens, encoder.device
        token = block_tokens + encoder.lookahead, *encoder.token_shape
        shapes = (size.blocks, HEADER + size.pages), (size.blocks, *token), (2, size.rows)
        self._integers = IntegerTensors(shapes, device)
        self.table, self.tokens, self._slots = self._integers.tensors
        frames = encoder.token_mel_ratio * block_tokens
        self.mu = torch.zeros(size.blocks, encoder.mel_bands, frames, device=device)

    def fill(self, chunks: Sequence[PlacedChunk]) -> None:
        table, tokens = (
            np.full(tuple(part.shape), fill, np.int32)
            for part, fill in ((self.table, 0), (self.tokens, -1))
        )
        row = 0
        for number, placed in enumerate(chunks):
            write_table(table[row:], placed.place, number, self._block_tokens)
            row += self._write_tokens(tokens[row:], placed)
        slots = slots_of([placed.place for placed in chunks], self._slots.shape[1])
        self._integers.fill(table, tokens, slots)
        count = len(chunks)
        self._states.read(self._slots[0, :count], self._rows.first(count))

    def compute(self) -> None:
        step = BlockStep(self._rows.views, table=self.table, block=self._block_tokens)
        attention = BlockAttention(self._cache, self.table, self._block_tokens)
        # Copied, because the result is in the memory that all graphs share.
        self.mu.copy_(self._encoder.encode_blocks(self.tokens, step, attention))

    def take(self, chunks: Sequence[PlacedChunk]) -> list[torch.Tensor]:
        count = len(chunks)
        self._states.write(self._slots[1, :count].long(), self._rows.first(count))
        ratio = self._encoder.token_mel_ratio
        # (bands, rows * frames of a block), in one copy
        mu = self.mu.transpose(0, 1).clone(memory_format=torch.contiguous_format).flatten(1)
        mus, row = [], 0
        for placed in chunks:
            place = placed.place
            first = ratio * (row * self._block_tokens + place.padding)
            mus.append(mu[:, first : first + ratio * (place.length - place.padding)])
            row += len(place.tables)
        return mus

    def _write_tokens(self, rows: NDArray[np.int32], placed: PlacedChunk) -> int:
        padding, count = placed.place.padding, len(placed.place.tables)
        tokens = self._encoder.with_lookahead(placed.chunk, placed.grid)
        width = rows.shape[1]
        line = np.full(((count - 1) * self._block_tokens + width, *rows.shape[2:]), -1, np.int32)
        line[padding : padding + len(tokens)] = tokens
        for index in range(count):
            rows[index] = line[index * self._block_tokens :][:width]
        return count


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockStep(StreamStep):
    """Step of a streaming network over rows of blocks. The input before a block comes from the row
    above, or from the state of its stream.
    """

    table: torch.Tensor
    block: int  # positions of a block in the unit of the table

    def with_context(
        self,
        layer: Streaming,
        x: torch.Tensor,
        left: int = 0,
        right: int | None = None,
        mode: str = "constant",
        activation: Activation | None = None,
        channels_last: bool | None = None,
    ) -> torch.Tensor:
        """Returns the input (rows, C, T) of a causal layer with the positions before each block."""
        assert self.state is not None
        assert right is None
        assert activation is None
        state, rate = self.state[layer], x.shape[2] // self.block
        reach, table = layer.state_shape[-1], self.table
        # The positions before the first token of a prompt with padding are zeros.
        positions = torch.arange(x.shape[2], device=x.device)
        padding = rate * (table[:, Column.PROMPT_PADDING, None] - table[:, Column.START, None])
        x = x.masked_fill((positions < padding)[:, None], 0.0)
        follows = table[:, Column.BEFORE, None, None] > 0
        above = x[:, :, x.shape[2] - reach :].roll(1, dims=0)
        x = torch.cat(
            (torch.where(follows, above, state.index_select(0, table[:, Column.CHUNK])), x), dim=2
        )
        # The new state ends with the last valid position of the chunk. Rows that do not end a chunk
        # write to one extra place, which is cut off.
        count = len(state)
        ends = table[:, Column.CHUNK].masked_fill(table[:, Column.LAST] == 0, count).long()
        after = rate * table[:, Column.VALID, None, None] + positions[:reach]
        new_state = x.gather(2, after.expand(-1, x.shape[1], -1))
        state.copy_(
            new_state.new_empty(count + 1, *new_state.shape[1:]).index_copy_(0, ends, new_state)[
                :count
            ]
        )
        return x


class BlockAttention:
    """`ConformerAttention` of blocks over their pages, on the device alone.

    Args:
        cache: encoder keys and values, to which those of the blocks are written.
        table: block table of the batch, in tokens.
    """

    def __init__(self, cache: EncoderCache, table: torch.Tensor, block: int) -> None:
        self._cache, self._table, self._block = cache, table, block

    @cached_property
    def _block_pages(self) -> torch.Tensor:
        """Page (rows,) of every block; the scratch page for rows that hold no block."""
        table = self._table
        column = HEADER - 1 + table[:, Column.NUM_CAUSAL_PAGES, None].long()
        pages = table.gather(1, column)[:, 0].long()
        return pages.masked_fill_(table[:, Column.VALID] == 0, self._cache.scratch)

    def at_rate(self, x: torch.Tensor, rate: int) -> LayerAttention:
        from token2wav.kernels.relative_attention import relative_attention

        # In float64, because a float32 angle of a long stream has few digits after the point.
        positions = torch.arange(rate * self._block, device=x.device, dtype=torch.float64)
        positions = positions + rate * self._table[:, Column.START, None]
        angles = positions.flatten()[:, None] * frequencies(x.shape[2], x.device).double()
        cos, sin = angles.cos().float(), angles.sin().float()
        # The product of a rotated query and the sinusoids of a key depends on their distance alone.
        rotation = torch.complex(cos, sin)  # (blocks * positions, size / 2)
        sinusoids = self._cache.sinusoids(rate)
        block_sinusoids = torch.stack((-sin, cos), dim=-1).flatten(1).unflatten(0, (len(x), -1))
        sinusoids.index_copy_(0, self._block_pages, block_sinusoids)

        def attend(
            layer: int,
            attention: RelativeAttention,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
        ) -> torch.Tensor:
            view = self._cache.layer(layer)
            view.write(self._block_pages, k[None], v[None])
            by_position = attention.position_queries(q)
            torch.view_as_complex(by_position.unflatten(2, (-1, 2))).mul_(rotation)
            by_position = by_position.unflatten(1, q.shape[:2])
            return relative_attention(
                q, by_position, attention.pos_bias_u, view, sinusoids, self._table, rate
            )

        return attend
