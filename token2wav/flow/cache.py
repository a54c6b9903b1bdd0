"""What the estimator remembers of finished blocks, so that a chunk costs only itself.

At a given ODE step, layer and guidance branch the keys and values of a finished block never change: attention looks
back in whole blocks, the noise is fixed by position, and the convolutions are causal. The same holds for the last
inputs of the two position convolutions. So they are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from token2wav.flow_config import FlowConfig

Storage = Literal["float32", "float16", "int8"]

BRANCHES = 2  # conditional, unconditional; only the first without guidance
_KEY, _VALUE = 0, 1
_TYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
_INT8_MAX = 127.0


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of the cache of one model.

    Attributes:
        steps: ODE steps.
        layers: of the estimator.
        heads: of each layer.
        dim_head: of each head.
        block_frames: frames in a page.
        storage: type in which keys and values are kept; int8 has a scale per token and head.
        branches: of guidance.
    """

    steps: int
    layers: int
    heads: int
    dim_head: int
    block_frames: int
    storage: Storage = "float32"
    branches: int = BRANCHES

    @classmethod
    def of(cls, config: FlowConfig, storage: Storage = "float32", steps: int = 0) -> CacheLayout:
        """The layout of a model; `steps` are the most that a stream has, 0 for the model's own number."""
        estimator = config.estimator
        return cls(
            steps or config.n_timesteps,
            estimator.depth,
            estimator.heads,
            estimator.dim_head,
            estimator.static_chunk_size,
            storage,
            BRANCHES if config.inference_cfg_rate else 1,
        )

    @property
    def vectors_per_page(self) -> int:
        """Heads' keys and values of all frames, branches, layers and steps of one page."""
        return self.steps * self.layers * 2 * self.branches * self.block_frames * self.heads

    @property
    def page_bytes(self) -> int:
        per_vector = self.dim_head * _TYPES[self.storage].itemsize
        scale = torch.float32.itemsize if self.storage == "int8" else 0
        return self.vectors_per_page * (per_vector + scale)


@dataclass(frozen=True)
class PageIndex:
    """Pages of one stream.

    Attributes:
        count: how many.
        where: a slice if they follow one another in the store, else their numbers (count,) on its device.
    """

    count: int
    where: slice | torch.Tensor


@dataclass(frozen=True, eq=False)
class LayerPages:
    """All pages of a store at one step and layer, for kernels that find their way through them by themselves.

    Attributes:
        keys, values: (branches, pages, block_frames, heads, dim_head), contiguous.
        key_scales, value_scales: (branches, pages, block_frames, heads) with int8.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None


class KeyValueStore:
    """Memory of all pages. Which page belongs to whom is not its business (`engines/paging.py`).

    Args:
        layout: sizes.
        pages: how many.
        device: where.

    Attributes:
        zeros: number of a page that is never written, to read where there is only padding.
        waste: number of a page that is never read, to write padding to. One page for both would carry the NaN of a
            broken stream into others: what is masked is multiplied by 0, which leaves NaN.
    """

    def __init__(self, layout: CacheLayout, pages: int, device: torch.device) -> None:
        self.layout = layout
        self.pages = pages
        self.zeros, self.waste = pages, pages + 1
        # Page after branch: the pages of one stream, read at one step and layer, are one run of memory where the
        # page numbers are. On a CPU, memory that was never written takes no room.
        shape = (layout.steps, layout.layers, 2, layout.branches, pages + 2, layout.block_frames, layout.heads)
        self._data = torch.empty(*shape, layout.dim_head, dtype=_TYPES[layout.storage], device=device)
        self._scale = torch.empty(shape, device=device) if layout.storage == "int8" else None
        self._data[:, :, :, :, self.zeros] = 0
        if self._scale is not None:
            self._scale[:, :, :, :, self.zeros] = 0

    def index(self, pages: list[int]) -> PageIndex:
        """Pages in a form to read and write them with, many times."""
        run = list(range(pages[0], pages[0] + len(pages)))
        if pages == run:
            return PageIndex(len(pages), slice(pages[0], pages[0] + len(pages)))
        return PageIndex(len(pages), torch.tensor(pages, device=self._data.device))

    def write(self, step: int, layer: int, pages: PageIndex, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k and v (branches, pages * block_frames, heads * dim_head) of one step and layer."""
        for which, value in ((_KEY, k), (_VALUE, v)):
            value = value.unflatten(1, (pages.count, -1)).unflatten(-1, (self.layout.heads, -1))
            if self._scale is not None:
                scale = _scale_of(value)
                _put(self._scale[step, layer, which], pages, scale)
                value = (value / scale[..., None]).round()
            _put(self._data[step, layer, which], pages, value.to(self._data.dtype))

    def read(
        self, step: int, layer: int, pages: PageIndex, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of pages in order, each (branches, pages * block_frames, heads * dim_head).

        They are views of the store where pages follow one another and are kept in the type that is asked for.
        """
        values = _pages(self._data[step, layer], pages)  # (2, branches, count, block_frames, heads, dim_head)
        if self._scale is not None:
            values = values * _pages(self._scale[step, layer], pages)[..., None]
        k, v = values.to(dtype).flatten(4).flatten(2, 3).unbind()
        return k, v

    def layer(self, step: int, layer: int) -> LayerPages:
        """Views of the store, to be written, too."""
        keys, values = self._data[step, layer].unbind()
        scales = (None, None) if self._scale is None else self._scale[step, layer].unbind()
        return LayerPages(keys, values, *scales)

    def gather(self, step: int, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copies pages (n,) of all layers of one step.

        Args:
            step: ODE step.
            pages: (n,) their numbers, on the device.
            out: (layers, 2, branches, n, block_frames, heads, dim_head) in any floating-point type.
        """
        if out.dtype == self._data.dtype:
            torch.index_select(self._data[step], 3, pages, out=out)
            return
        values = self._data[step].index_select(3, pages)
        if self._scale is None:
            out.copy_(values)
        else:
            torch.mul(values, self._scale[step].index_select(3, pages)[..., None], out=out)

    def scatter(self, step: int, pages: torch.Tensor, values: torch.Tensor) -> None:
        """Stores what `gather` would give; of pages that are named twice it is not said which value stays."""
        if self._scale is not None:
            scale = _scale_of(values)
            self._scale[step].index_copy_(3, pages, scale)
            values = (values / scale[..., None]).round()
        self._data[step].index_copy_(3, pages, values.to(self._data.dtype))


def _pages(values: torch.Tensor, pages: PageIndex) -> torch.Tensor:
    """Pages of keys and values (2, branches, pages, ...); on a CPU, indexing would copy number by number."""
    if isinstance(pages.where, slice):
        return values[:, :, pages.where]
    return values.index_select(2, pages.where)


def _put(values: torch.Tensor, pages: PageIndex, new: torch.Tensor) -> None:
    """Writes pages of (branches, pages, ...)."""
    if isinstance(pages.where, slice):
        values[:, pages.where] = new
    else:
        values.index_copy_(1, pages.where, new)


def _scale_of(values: torch.Tensor) -> torch.Tensor:
    """Width of an int8 step for every vector (..., dim_head)."""
    return values.float().abs().amax(dim=-1).clamp(min=1e-12) / _INT8_MAX


class ChunkMemory:
    """The estimator's memory while chunks of one shape are computed, each of another utterance.

    In tensors the chunks stand one behind the other: frames are those of the first, then those of the second ...

    Args:
        store: memory of all pages.
        past: pages of the blocks that a chunk can see, in order, of every utterance; as many of each.
        new: pages that take the chunk's own blocks, likewise.
        contexts: (steps, 2 convolutions, branches, dim, kernel - 1) last inputs of the position convolutions, of every
            utterance; `finish` replaces them by those of the chunk.
    """

    def __init__(
        self,
        store: KeyValueStore,
        past: Sequence[list[int]],
        new: Sequence[list[int]],
        contexts: Sequence[torch.Tensor],
    ) -> None:
        self._store = store
        self._new = store.index([page for own in new for page in own])
        self._visible = store.index([page for before, own in zip(past, new, strict=True) for page in before + own])
        self._before = contexts
        self._contexts = torch.stack(list(contexts), dim=3)  # (steps, 2, branches, utterances, dim, kernel - 1)

    def step(self, index: int) -> StepMemory:
        return StepMemory(self._store, index, self._new, self._visible, self._contexts[index])

    def finish(self) -> None:
        """Hands the contexts over."""
        for before, after in zip(self._before, self._contexts.unbind(3), strict=True):
            before.copy_(after)


class StepMemory:
    """`ChunkMemory` at one ODE step."""

    def __init__(
        self, store: KeyValueStore, step: int, new: PageIndex, visible: PageIndex, contexts: torch.Tensor
    ) -> None:
        self._store = store
        self._step = step
        self._new = new
        self._visible = visible
        self._contexts = contexts
        self._chunks = contexts.shape[2]

    def attend(
        self,
        layer: int,
        attend: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Memory`."""
        k, v = self.extend_attention(layer, k, v)
        return attend(self._apart(q), k, v, bias).unflatten(0, (-1, self._chunks)).flatten(1, 2)

    def extend_conv(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Puts the last inputs of a position convolution before each chunk, and notes those of x.

        Args:
            index: of the convolution.
            x: (branches, dim, chunks * frames).

        Returns:
            (branches * chunks, dim, kernel - 1 + frames).
        """
        chunks = x.unflatten(2, (self._chunks, -1)).transpose(1, 2)  # (branches, chunks, dim, frames)
        extended = torch.cat((self._contexts[index], chunks), dim=3)
        self._contexts[index] = extended[..., -self._contexts.shape[-1] :]
        return extended.flatten(0, 1)

    def behind_each_other(self, x: torch.Tensor) -> torch.Tensor:
        """(branches * chunks, dim, frames) to (branches, dim, chunks * frames)."""
        return x.unflatten(0, (-1, self._chunks)).transpose(1, 2).flatten(2)

    def extend_attention(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the chunks' keys and values (branches, chunks * frames, inner) and returns all that each can see.

        The chunks' own are read back from the store, so that what a frame sees does not depend on how blocks were
        grouped into chunks, whatever the storage type. A last block that is not full is padded with zeros.

        Returns:
            Keys and values, (branches * chunks, keys, inner).
        """
        missing = self._new.count * self._store.layout.block_frames - k.shape[1]
        if missing:
            k, v = (
                torch.nn.functional.pad(self._apart(value), (0, 0, 0, missing // self._chunks))
                .unflatten(0, (-1, self._chunks))
                .flatten(1, 2)
                for value in (k, v)
            )
        self._store.write(self._step, layer, self._new, k, v)
        k, v = self._store.read(self._step, layer, self._visible, k.dtype)
        return self._apart(k), self._apart(v)

    def _apart(self, x: torch.Tensor) -> torch.Tensor:
        """(branches, chunks * n, inner) to (branches * chunks, n, inner)."""
        return x.unflatten(1, (self._chunks, -1)).flatten(0, 1)
