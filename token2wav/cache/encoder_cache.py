"""Paged key-value cache of an encoder with attention, as in CosyVoice2.

The encoder and the estimator share the page numbers of a stream. Each of the two has tensors of its
own for the content of the pages.

For kernels a page also holds the sinusoids of its absolute positions, which all layers of one rate
share. With them a score by distance is a plain product of two vectors (`stages/encoder_runner.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from token2wav.cache.paged_kv_cache import CacheLayout, LayerView, PagedKVCache
from token2wav.config.block_grid import BlockGrid
from token2wav.layers.streaming import KeyValueSpec


class EncoderCache:
    """Keys and values of the layers of an encoder for all open streams, in float32."""

    def __init__(
        self,
        specs: Sequence[KeyValueSpec],  # in the order of the layers
        block_tokens: int,
        pages: int,
        device: torch.device,
    ) -> None:
        self.page_bytes = page_bytes(specs, block_tokens)
        self.scratch = pages + 1  # see `PagedKVCache`
        # For every layer: positions per token, cache, and index of the layer in the cache.
        self.layers: list[tuple[int, PagedKVCache, int]] = []
        # `empty`, because no path reads them on a CPU: there they use no physical memory.
        self._sinusoids = {
            spec.rate: torch.empty(pages + 2, spec.rate * block_tokens, spec.size, device=device)
            for spec in specs
        }
        for spec in specs:
            cache = PagedKVCache(_layout(spec, block_tokens), pages, device)
            self.layers += [(spec.rate, cache, layer) for layer in range(spec.layers)]

    def layer(self, index: int) -> LayerView:
        _, cache, layer = self.layers[index]
        return cache.layer(0, layer)

    def sinusoids(self, rate: int) -> torch.Tensor:
        """Returns the sinusoids (pages, positions, size) of one rate."""
        return self._sinusoids[rate]


class EncoderContext:
    """`ConformerContext` of one chunk of one stream, which reads and writes pages."""

    def __init__(
        self,
        cache: EncoderCache,
        grid: BlockGrid,
        start: int,
        tokens: int,
        tables: Sequence[Sequence[int]],  # of the blocks of the chunk
    ) -> None:
        self.start, self.past = start, grid.visible_spans(start)
        self._layers = cache.layers
        # Padding tokens in front of the first key that is read. Only the first page of a stream
        # begins with padding, and a window of past blocks may no longer include that page.
        first_key = self.past[0][0] if self.past else start
        self._skipped = grid.prompt_padding if first_key == 0 else 0
        # Padding tokens in front of the chunk.
        self._in_front = grid.prompt_padding if start == 0 else 0
        self._stop = sum(stop - first for first, stop in self.past) + self._skipped + tokens
        if self._layers:
            _, first_cache, _ = self._layers[0]  # all layers have the same page numbers
            chunk_pages = [table[-1] for table in tables]
            self._chunk_pages = first_cache.index(chunk_pages)
            self._pages = first_cache.index([*tables[0][:-1], *chunk_pages])

    def attend(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values (1, T, size) of the chunk in the pages of a layer. Returns
        the keys and values of the past and the chunk.
        """
        rate, cache, index = self._layers[layer]
        view: LayerView = cache.layer(0, index)
        front, frames = rate * self._in_front, view.data.shape[3]
        back = -(front + k.shape[1]) % frames
        k, v = (F.pad(new, (0, 0, front, back)).unflatten(1, (-1, frames)) for new in (k, v))
        view.write(self._chunk_pages, k, v)
        k, v = view.read(self._pages, rate * self._stop)
        return k[:, rate * self._skipped :], v[:, rate * self._skipped :]


def page_bytes(specs: Sequence[KeyValueSpec], block_tokens: int) -> int:
    """Returns the bytes of the keys, values and sinusoids of an encoder in one page."""
    return sum(
        _layout(spec, block_tokens).page_bytes
        + spec.rate * block_tokens * spec.size * torch.float32.itemsize
        for spec in specs
    )


def _layout(spec: KeyValueSpec, block_tokens: int) -> CacheLayout:
    return CacheLayout(
        steps=1,
        layers=spec.layers,
        heads=1,
        dim_head=spec.size,
        block_frames=spec.rate * block_tokens,
        branches=1,
    )
