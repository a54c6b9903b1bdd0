"""Paged key-value cache, which stores the keys and values of finished blocks.

At a given ODE step, layer and guidance branch, the keys and values of a finished block never
change. There are three reasons: attention looks back in whole blocks, the noise depends only on the
position of a frame, and the convolutions are causal. The keys and values are therefore computed
once, and a chunk computes only its own frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from token2wav.config.model_config import ModelConfig
from token2wav.networks.estimator import Estimator

Storage = Literal["float32", "float16", "int8", "float8"]
# Page numbers: a slice if they are consecutive, else a tensor (n,) on the device of the cache.
Pages = slice | torch.Tensor

BRANCHES = 2  # conditional and unconditional; without guidance only the conditional one
_TYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
# Largest stored numbers of the types that need scales. A stored number times its scale is the
# value.
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True)
class CacheLayout:
    """Layout of the cache of one model.

    Attributes:
        block_frames: frames of a page, which holds one attention block.
        storage: int8 has one scale per frame and head, and float8 (e4m3) has one scale per page and
            head.
        conv_state: shape of the estimator's convolution states at one ODE step, which are stored
            outside of the pages.
    """

    steps: int
    layers: int
    heads: int
    dim_head: int
    block_frames: int
    storage: Storage = "float32"
    branches: int = BRANCHES
    bands: int = 80
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
        """Computes the layout of a model. `guidance` is 0 without classifier-free guidance."""
        layers, heads, dim_head = estimator.attention
        frames, branches = config.token_mel_ratio * config.block_tokens, BRANCHES if guidance else 1
        conv_state = branches, estimator.state_width
        return cls(
            steps, layers, heads, dim_head, frames, storage, branches, config.mel_bands, conv_state
        )

    @property
    def vectors_per_page(self) -> int:
        """Vectors (dim_head,) in a page."""
        return self.steps * self.layers * 2 * self.branches * self.block_frames * self.heads

    @property
    def scaled_frames(self) -> int:
        """Scales in a page for each head of the keys or values; 0 without scales."""
        return {"int8": self.block_frames, "float8": 1}.get(self.storage, 0)

    @property
    def page_bytes(self) -> int:
        numbers = self.vectors_per_page * self.dim_head
        scales = self.vectors_per_page // self.block_frames * self.scaled_frames
        return numbers * _TYPES[self.storage].itemsize + scales * torch.float32.itemsize


@dataclass(frozen=True, eq=False)
class LayerView:
    """View of the cache at one ODE step and layer, for reading and writing.

    Attributes:
        data: (2, branches, pages, block_frames, heads, dim_head), contiguous: keys, then values.
        scales: (2, branches, pages, scaled_frames, heads), scales of int8 or float8, in float32;
            None for other dtypes.
    """

    data: torch.Tensor
    scales: torch.Tensor | None

    @property
    def parts(self) -> tuple[torch.Tensor | None, ...]:
        """Keys, values, scales of the keys, scales of the values."""
        return *self.data.unbind(), *((None, None) if self.scales is None else self.scales.unbind())

    def write(
        self, pages: Pages, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """Stores keys and values in n pages.

        Args:
            k: keys, (branches, n, frames, heads * dim_head), for the first frames of the pages.
            valid: (n,) frames of every page that are read later; None for all frames. Only they
                affect the scales.
        """
        frames = k.shape[2]
        for which, new in enumerate((k, v)):
            value = new.unflatten(-1, self.data.shape[-2:])
            if self.scales is not None:
                scale = _scales_of(value, self.data.dtype, self.scales.shape[3], valid)
                _put(self.scales[which][:, :, :frames], pages, scale)
                value = value / scale[..., None]
            _put(self.data[which][:, :, :frames], pages, _rounded(value, self.data.dtype))

    def read(
        self, pages: Pages, frames: int, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values, each (branches, frames, heads * dim_head) in `dtype`.

        They are views of the cache if the pages are consecutive and `dtype` is that of the cache.
        """
        # (2, branches, frames, heads, dim_head)
        values = _of_pages(self.data, pages).flatten(2, 3)[:, :, :frames]
        if self.scales is not None:
            scales = _of_pages(self.scales, pages)
            scales = scales.expand(-1, -1, -1, self.data.shape[3], -1)
            values = _factor(values) * scales.flatten(2, 3)[:, :, :frames, :, None]
        k, v = values.to(dtype).flatten(3).unbind()
        return k, v


class PagedKVCache:
    """Key-value cache of all open streams, in pages of one attention block.

    Padding in a batch reads from the null page and writes to the scratch page. A single page for
    both would spread a NaN from one stream to others: attention multiplies masked values by 0, and
    NaN times 0 is NaN.
    """

    def __init__(self, layout: CacheLayout, pages: int, device: torch.device) -> None:
        self.layout = layout
        self.pages = pages  # without the following two
        self.null = pages  # zero and never written
        self.scratch = pages + 1  # never read
        # The page axis comes after the branch axis, so that pages with consecutive numbers are
        # contiguous in memory at one step, layer and branch. The tensor is not filled, so that on a
        # CPU pages that were never written use no physical memory.
        shape = (
            layout.steps,
            layout.layers,
            2,
            layout.branches,
            pages + 2,
        )
        sizes = layout.block_frames, layout.heads, layout.dim_head
        self._data = torch.empty(*shape, *sizes, dtype=_TYPES[layout.storage], device=device)
        self._scales = None
        if layout.scaled_frames:
            self._scales = torch.empty(*shape, layout.scaled_frames, layout.heads, device=device)
        self._data[:, :, :, :, self.null] = 0
        if self._scales is not None:
            self._scales[:, :, :, :, self.null] = 0

    @property
    def device(self) -> torch.device:
        return self._data.device

    def index(self, pages: list[int]) -> Pages:
        """Converts page numbers to `Pages`, once for all layers."""
        first, count = pages[0], len(pages)
        if pages == list(range(first, first + count)):
            return slice(first, first + count)
        return torch.tensor(pages, device=self.device)

    def layer(self, step: int, layer: int) -> LayerView:
        return LayerView(
            self._data[step, layer], None if self._scales is None else self._scales[step, layer]
        )

    def gather(self, step: int, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copies pages (n,) of all layers of one ODE step into `out` (layers, 2, branches, n,
        block_frames, heads, dim_head), of any floating-point dtype.
        """
        if out.dtype == self._data.dtype:
            torch.index_select(self._data[step], 3, pages, out=out)
            return
        values = _selected(self._data[step], 3, pages)
        if self._scales is None:
            out.copy_(values)
        else:
            scales = self._scales[step].index_select(3, pages)
            torch.mul(_factor(values), scales[..., None], out=out)

    def scatter(
        self, step: int, pages: torch.Tensor, values: torch.Tensor, valid: torch.Tensor
    ) -> None:
        """Stores pages of all layers of one ODE step: the inverse of `gather`.

        Args:
            pages: (n,) page numbers. If a number occurs twice, either of its values is stored.
            values: shaped as `out` of `gather`.
            valid: as in `LayerView.write`.
        """
        if self._scales is not None:
            scale = _scales_of(values, self._data.dtype, self._scales.shape[5], valid)
            self._scales[step].index_copy_(3, pages, scale)
            values = values / scale[..., None]
        new = _rounded(values, self._data.dtype)
        _indexable(self._data[step]).index_copy_(3, pages, _indexable(new))


def _indexable(values: torch.Tensor) -> torch.Tensor:
    """Returns float8 as int8, because torch has no operators with indices for float8."""
    return values.view(torch.int8) if values.dtype == torch.float8_e4m3fn else values


def _selected(values: torch.Tensor, dim: int, pages: torch.Tensor) -> torch.Tensor:
    return _indexable(values).index_select(dim, pages).view(values.dtype)


def _of_pages(values: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Returns pages (2, branches, n, ...) of `values` (2, branches, pages, ...)."""
    # `index_select`, because on a CPU indexing with a tensor copies element by element.
    return values[:, :, pages] if isinstance(pages, slice) else _selected(values, 2, pages)


def _put(values: torch.Tensor, pages: Pages, new: torch.Tensor) -> None:
    """Writes `new` into pages of `values`, (branches, pages, ...)."""
    if isinstance(pages, slice):
        values[:, pages] = new
    else:
        _indexable(values).index_copy_(1, pages, _indexable(new))


def _factor(values: torch.Tensor) -> torch.Tensor:
    """Returns stored numbers in a dtype that torch multiplies with float32, which float8 is not."""
    return values.float() if values.dtype == torch.float8_e4m3fn else values


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (values.round() if dtype == torch.int8 else values).to(dtype)


def _scales_of(
    values: torch.Tensor, dtype: torch.dtype, scaled_frames: int, valid: torch.Tensor | None
) -> torch.Tensor:
    """Computes the scales (..., n, scaled_frames, heads) of pages (..., n, block_frames, heads,
    dim_head). `valid` is that of `LayerView.write`.
    """
    most = values.float().abs().amax(dim=-1)
    if scaled_frames == 1:
        if valid is not None:
            frames = torch.arange(most.shape[-2], device=most.device)
            most = most.masked_fill((frames >= valid[:, None])[..., None], 0)
        most = most.amax(dim=-2, keepdim=True)
    return most.clamp(min=1e-12) / _LARGEST[dtype]
