"""Keys and values of finished blocks, so that a chunk costs only itself.

At a given ODE step, layer and guidance branch the keys and values of a finished block never change:
attention looks back in whole blocks, the noise is fixed by position, and the convolutions are
causal. So they are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from token2wav.model_config import ModelConfig
from token2wav.networks.estimator import Estimator

Storage = Literal["float32", "float16", "int8"]
# numbers of pages: a slice where they follow one another, else (n,) on the cache's device
Pages = slice | torch.Tensor

BRANCHES = 2  # conditional, unconditional; only the first without guidance
_TYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.int8,
}
_INT8_MAX = 127.0


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of what one model keeps of a stream at every ODE step."""

    steps: int
    layers: int  # of the estimator
    heads: int
    dim_head: int
    block_frames: int  # of a page
    # type in which keys and values are kept; int8 has a scale per token and head
    storage: Storage = "float32"
    branches: int = BRANCHES  # of guidance
    bands: int = 80  # of the mel
    # shape of what the estimator keeps beside keys and values, at each step
    conv_state: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        estimator: Estimator,
        guidance: float,
        steps: int,
        storage: Storage,
    ) -> CacheLayout:
        """Layout of a model with so many ODE steps at most, with guidance or, where that is 0,
        without.
        """
        layers, heads, dim_head = estimator.attention
        frames, branches = config.token_mel_ratio * config.block_tokens, BRANCHES if guidance else 1
        conv_state = branches, estimator.state_width
        return cls(
            steps, layers, heads, dim_head, frames, storage, branches, config.mel_bands, conv_state
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


@dataclass(frozen=True, eq=False)
class LayerView:
    """View of the cache at one ODE step and layer, to read and to write."""

    # (2, branches, pages, block_frames, heads, dim_head), contiguous: keys, then values
    data: torch.Tensor
    scales: torch.Tensor | None  # (2, branches, pages, block_frames, heads) with int8

    @property
    def parts(self) -> tuple[torch.Tensor | None, ...]:
        """Keys, values, and the scales of both or None."""
        return *self.data.unbind(), *((None, None) if self.scales is None else self.scales.unbind())

    def write(self, pages: Pages, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k and v (branches, n, block_frames, heads * dim_head) in n pages."""
        for which, new in enumerate((k, v)):
            value = new.unflatten(-1, self.data.shape[-2:])
            if self.scales is not None:
                scale = _scale_of(value)
                _put(self.scales[which], pages, scale)
                value = (value / scale[..., None]).round()
            _put(self.data[which], pages, value.to(self.data.dtype))

    def read(
        self, pages: Pages, frames: int, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first frames of pages, each (branches, frames, heads * dim_head).

        They are views of the cache where pages follow one another and are kept in the type that is
        asked for.
        """
        values = _frames(self.data, pages, frames)  # (2, branches, frames, heads, dim_head)
        if self.scales is not None:
            values = values * _frames(self.scales, pages, frames)[..., None]
        k, v = values.to(dtype).flatten(3).unbind()
        return k, v


class PagedKVCache:
    """Key-value cache of all open streams, in pages of one attention block.

    Attributes:
        null: number of a page that is never written, to read where there is only padding.
        scratch: number of a page that is never read, to write padding to. One page for both would
            carry the NaN of a broken stream into others: what is masked is multiplied by 0, which
            leaves NaN.
    """

    def __init__(self, layout: CacheLayout, pages: int, device: torch.device) -> None:
        self.layout = layout
        self.pages = pages
        self.null, self.scratch = pages, pages + 1
        # Page after branch: the pages of one stream, read at one step and layer, are one run of
        # memory where the page numbers are. On a CPU, memory that was never written takes no room.
        shape = (
            layout.steps,
            layout.layers,
            2,
            layout.branches,
            pages + 2,
            layout.block_frames,
            layout.heads,
        )
        self._data = torch.empty(
            *shape, layout.dim_head, dtype=_TYPES[layout.storage], device=device
        )
        self._scales = torch.empty(shape, device=device) if layout.storage == "int8" else None
        self._data[:, :, :, :, self.null] = 0
        if self._scales is not None:
            self._scales[:, :, :, :, self.null] = 0

    @property
    def device(self) -> torch.device:
        return self._data.device

    def index(self, pages: list[int]) -> Pages:
        """Pages in a form to read and write them with, many times."""
        first, count = pages[0], len(pages)
        if pages == list(range(first, first + count)):
            return slice(first, first + count)
        return torch.tensor(pages, device=self.device)

    def layer(self, step: int, layer: int) -> LayerView:
        return LayerView(
            self._data[step, layer], None if self._scales is None else self._scales[step, layer]
        )

    def gather(self, step: int, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copies pages (n,) of all layers of one step.

        `out` is (layers, 2, branches, n, block_frames, heads, dim_head) in any floating-point type.
        """
        if out.dtype == self._data.dtype:
            torch.index_select(self._data[step], 3, pages, out=out)
            return
        values = self._data[step].index_select(3, pages)
        if self._scales is None:
            out.copy_(values)
        else:
            torch.mul(values, self._scales[step].index_select(3, pages)[..., None], out=out)

    def scatter(self, step: int, pages: torch.Tensor, values: torch.Tensor) -> None:
        """Stores what `gather` would give; of pages that are named twice it is not said which value
        stays.
        """
        if self._scales is not None:
            scale = _scale_of(values)
            self._scales[step].index_copy_(3, pages, scale)
            values = (values / scale[..., None]).round()
        self._data[step].index_copy_(3, pages, values.to(self._data.dtype))


def _frames(values: torch.Tensor, pages: Pages, frames: int) -> torch.Tensor:
    """The first frames of pages: (2, branches, pages, block_frames, ...) to (2, branches, frames,
    ...).
    """
    if isinstance(pages, slice):
        first = pages.start * values.shape[3]
        return values.flatten(2, 3)[:, :, first : first + frames]
    # On a CPU, indexing would copy number by number.
    return values.index_select(2, pages).flatten(2, 3)[:, :, :frames]


def _put(values: torch.Tensor, pages: Pages, new: torch.Tensor) -> None:
    """Writes pages of (branches, pages, ...)."""
    if isinstance(pages, slice):
        values[:, pages] = new
    else:
        values.index_copy_(1, pages, new)


def _scale_of(values: torch.Tensor) -> torch.Tensor:
    """Width of an int8 step for every vector (..., dim_head)."""
    return values.float().abs().amax(dim=-1).clamp(min=1e-12) / _INT8_MAX
