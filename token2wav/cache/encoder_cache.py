"""Keys and values of an encoder, in the pages of the estimator.

A page of the block pool holds one attention block. The encoder and the estimator each have tensors
of their own for the content of a page, and share the page numbers of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from token2wav.block_grid import BlockGrid
from token2wav.cache.paged_kv_cache import CacheLayout, LayerView, PagedKVCache
from token2wav.networks.streaming import KeyValueSpec


class EncoderCache:
    """Keys and values of the layers of an encoder for all open streams, in float32.

    Args:
        specs: groups of layers with one rate each, in the order of their layers.
        block_tokens: tokens of an attention block.
        pages: number of pages.
        device: device of the tensors.

    Attributes:
        page_bytes: bytes of one page.
    """

    def __init__(
        self,
        specs: Sequence[KeyValueSpec],
        block_tokens: int,
        pages: int,
        device: torch.device,
    ) -> None:
        self.page_bytes = page_bytes(specs, block_tokens)
        # For every layer of the encoder: positions per token, cache, and layer in the cache.
        self._layers: list[tuple[int, PagedKVCache, int]] = []
        for spec in specs:
            cache = PagedKVCache(_layout(spec, block_tokens), pages, device)
            self._layers += [(spec.rate, cache, layer) for layer in range(spec.layers)]

    def context(
        self, grid: BlockGrid, start: int, tokens: int, table: Sequence[int], own: Sequence[int]
    ) -> EncoderContext:
        """Returns the context of a chunk.

        Args:
            grid: block grid of the stream, in tokens.
            start: position of the first token of the chunk. It starts a block.
            tokens: number of tokens of the chunk.
            table: block table of the first block of the chunk.
            own: pages of all blocks of the chunk.
        """
        return EncoderContext(self._layers, grid, start, tokens, [*table[:-1], *own], len(own))


class EncoderContext:
    """`ConformerContext` of one chunk of one stream, which reads and writes pages."""

    def __init__(
        self,
        layers: Sequence[tuple[int, PagedKVCache, int]],
        grid: BlockGrid,
        start: int,
        tokens: int,
        pages: list[int],
        blocks: int,
    ) -> None:
        self.start, self.past = start, grid.visible_spans(start)
        self._layers = layers
        # Padding in the first page of the stream. Keys follow it, except under a window that has
        # moved past the first block.
        seen = self.past[0][0] if self.past else start
        self._skipped = grid.prompt_padding if seen == 0 else 0
        # Padding in front of the chunk, in its first page.
        self._in_front = grid.prompt_padding if start == 0 else 0
        self._stop = sum(stop - first for first, stop in self.past) + self._skipped + tokens
        if layers:
            cache = layers[0][1]
            self._own, self._all = cache.index(pages[len(pages) - blocks :]), cache.index(pages)

    def attend(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values (1, T, size) of the chunk, and returns them after the keys and
        values of the past.
        """
        rate, cache, index = self._layers[layer]
        view: LayerView = cache.layer(0, index)
        front, frames = rate * self._in_front, view.data.shape[3]
        back = -(front + k.shape[1]) % frames
        k, v = (F.pad(new, (0, 0, front, back)).unflatten(1, (-1, frames)) for new in (k, v))
        view.write(self._own, k, v)
        k, v = view.read(self._all, rate * self._stop)
        return k[:, rate * self._skipped :], v[:, rate * self._skipped :]


def page_bytes(specs: Sequence[KeyValueSpec], block_tokens: int) -> int:
    """Returns the bytes of the keys and values of an encoder in one page."""
    return sum(_layout(spec, block_tokens).page_bytes for spec in specs)


def _layout(spec: KeyValueSpec, block_tokens: int) -> CacheLayout:
    return CacheLayout(
        steps=1,
        layers=spec.layers,
        heads=1,
        dim_head=spec.size,
        block_frames=spec.rate * block_tokens,
        branches=1,
    )
