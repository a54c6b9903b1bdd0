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

from token2wav.model_config import ModelConfig
from token2wav.networks.estimator import Estimator

Storage = Literal["float32", "float16", "int8"]
# Page numbers: a slice if they are consecutive, else a tensor (n,) on the device of the cache.
Pages = slice | torch.Tensor

BRANCHES = 2  # conditional and unconditional; without guidance only the conditional one
_TYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.int8,
}
_INT8_MAX = 127.0


@dataclass(frozen=True)
class CacheLayout:
    """Layout of the cache of one model: the sizes of a page and of the convolution states.

    Attributes:
        steps: largest number of ODE steps.
        layers: number of attention layers.
        heads: number of attention heads.
        dim_head: size of a head.
        block_frames: frames of a page, which holds one attention block.
        storage: dtype of the stored keys and values. int8 has one scale per frame and head.
        branches: number of guidance branches.
        bands: number of mel bands.
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
        """Computes the layout of a model.

        Args:
            config: configuration of the model.
            estimator: network of the flow, whose attention layers use the cache.
            guidance: strength of classifier-free guidance; 0 for one branch without guidance.
            steps: largest number of ODE steps.
            storage: dtype of the stored keys and values.
        """
        layers, heads, dim_head = estimator.attention
        frames, branches = config.token_mel_ratio * config.block_tokens, BRANCHES if guidance else 1
        conv_state = branches, estimator.state_width
        return cls(
            steps, layers, heads, dim_head, frames, storage, branches, config.mel_bands, conv_state
        )

    @property
    def vectors_per_page(self) -> int:
        """Number of vectors (dim_head,) in a page.

        They are the keys and values of all steps, layers, branches, frames and heads.
        """
        return self.steps * self.layers * 2 * self.branches * self.block_frames * self.heads

    @property
    def page_bytes(self) -> int:
        per_vector = self.dim_head * _TYPES[self.storage].itemsize
        scale = torch.float32.itemsize if self.storage == "int8" else 0
        return self.vectors_per_page * (per_vector + scale)


@dataclass(frozen=True, eq=False)
class LayerView:
    """View of the cache at one ODE step and layer, for reading and writing.

    Attributes:
        data: (2, branches, pages, block_frames, heads, dim_head), contiguous: keys, then values.
        scales: (2, branches, pages, block_frames, heads), scales of int8; None for other dtypes.
    """

    data: torch.Tensor
    scales: torch.Tensor | None

    @property
    def parts(self) -> tuple[torch.Tensor | None, ...]:
        """Keys, values, scales of the keys and scales of the values; the scales may be None."""
        return *self.data.unbind(), *((None, None) if self.scales is None else self.scales.unbind())

    def write(self, pages: Pages, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores keys and values in n pages.

        Args:
            pages: page numbers.
            k: keys, (branches, n, block_frames, heads * dim_head).
            v: values, of the same shape.
        """
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
        """Returns the keys and the values of the first `frames` frames of pages.

        Returns:
            Keys and values, each (branches, frames, heads * dim_head) in `dtype`. They are views of
            the cache if the pages are consecutive and `dtype` is the dtype of the cache.
        """
        values = _frames(self.data, pages, frames)  # (2, branches, frames, heads, dim_head)
        if self.scales is not None:
            values = values * _frames(self.scales, pages, frames)[..., None]
        k, v = values.to(dtype).flatten(3).unbind()
        return k, v


class PagedKVCache:
    """Key-value cache of all open streams, in pages of one attention block.

    Padding in a batch reads from the null page and writes to the scratch page. A single page for
    both would spread a NaN from one stream to others: attention multiplies masked values by 0, and
    NaN times 0 is NaN.

    Args:
        layout: sizes of a page.
        pages: number of pages, besides the null and the scratch page.
        device: device of the tensors.

    Attributes:
        layout: sizes of a page.
        pages: number of pages.
        null: number of the null page, which is zero and never written.
        scratch: number of the scratch page, which is never read.
    """

    def __init__(self, layout: CacheLayout, pages: int, device: torch.device) -> None:
        self.layout = layout
        self.pages = pages
        self.null, self.scratch = pages, pages + 1
        # The page axis comes after the branch axis, so that pages with consecutive numbers are
        # contiguous in memory at one step, layer and branch. The tensor is not filled, so that on a
        # CPU pages that were never written use no physical memory.
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
        """Converts page numbers to `Pages`. Convert once, and use the result for all layers."""
        first, count = pages[0], len(pages)
        if pages == list(range(first, first + count)):
            return slice(first, first + count)
        return torch.tensor(pages, device=self.device)

    def layer(self, step: int, layer: int) -> LayerView:
        return LayerView(
            self._data[step, layer], None if self._scales is None else self._scales[step, layer]
        )

    def gather(self, step: int, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copies pages of all layers of one ODE step into `out`.

        Args:
            step: ODE step.
            pages: (n,) page numbers.
            out: (layers, 2, branches, n, block_frames, heads, dim_head) in any floating-point
                dtype.
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
        """Stores pages of all layers of one ODE step: the inverse of `gather`.

        Args:
            step: ODE step.
            pages: (n,) page numbers. If a number occurs twice, either of its values is stored.
            values: (layers, 2, branches, n, block_frames, heads, dim_head).
        """
        if self._scales is not None:
            scale = _scale_of(values)
            self._scales[step].index_copy_(3, pages, scale)
            values = (values / scale[..., None]).round()
        self._data[step].index_copy_(3, pages, values.to(self._data.dtype))


def _frames(values: torch.Tensor, pages: Pages, frames: int) -> torch.Tensor:
    """Returns the first `frames` frames (2, branches, frames, ...) of pages, from `values` (2,
    branches, pages, block_frames, ...).
    """
    if isinstance(pages, slice):
        first = pages.start * values.shape[3]
        return values.flatten(2, 3)[:, :, first : first + frames]
    # `index_select`, because on a CPU indexing with a tensor copies element by element.
    return values.index_select(2, pages).flatten(2, 3)[:, :, :frames]


def _put(values: torch.Tensor, pages: Pages, new: torch.Tensor) -> None:
    """Writes `new` into pages of `values`, (branches, pages, ...)."""
    if isinstance(pages, slice):
        values[:, pages] = new
    else:
        values.index_copy_(1, pages, new)


def _scale_of(values: torch.Tensor) -> torch.Tensor:
    """Computes the int8 scale (...,) of every vector of `values` (..., dim_head).

    A stored integer times the scale is the value.
    """
    return values.float().abs().amax(dim=-1).clamp(min=1e-12) / _INT8_MAX
