"""The flow's starting noise: a function of the absolute frame position and of nothing else."""

from __future__ import annotations

from functools import lru_cache

import torch

PUBLIC_SEED = 0
PAGE_FRAMES = 15000  # the public buffer: 300 s at 50 frames per second


@lru_cache(maxsize=4)
def _page(index: int, bands: int, device: torch.device) -> torch.Tensor:
    """(bands, PAGE_FRAMES). Page 0 is the public buffer; later pages have seeds of their own."""
    generator = torch.Generator().manual_seed(PUBLIC_SEED + index)  # of the CPU: others draw other numbers
    return torch.randn(1, bands, PAGE_FRAMES, generator=generator)[0].to(device)


class FlowNoise:
    """Gaussian noise of every frame, counted from the start of the prompt.

    A stock CosyVoice3 seeds all generators with 0 and draws 300 s; the same numbers are drawn here when first needed.
    Past their end the noise goes on with other seeds instead of failing.

    Args:
        bands: mel bands.
        table: (bands, T) that replaces the first T frames, for models that were built with other noise.
        device: where it is kept.
    """

    def __init__(self, bands: int, table: torch.Tensor | None = None, device: torch.device | str = "cpu") -> None:
        self._bands = bands
        self._device = torch.device(device)
        self._table = torch.empty(bands, 0, device=device) if table is None else table.to(device)

    def to(self, device: torch.device) -> FlowNoise:
        """The same noise, kept where it is needed."""
        return FlowNoise(self._bands, self._table, device)

    def window(self, start: int, stop: int) -> torch.Tensor:
        """(bands, stop - start) float32."""
        given = self._table.shape[1]
        parts = [self._table[:, start : min(stop, given)]] if start < given else []
        at = max(start, given)
        while at < stop:
            page, offset = divmod(at, PAGE_FRAMES)
            take = min(stop - at, PAGE_FRAMES - offset)
            parts.append(_page(page, self._bands, self._device)[:, offset : offset + take])
            at += take
        return torch.cat(parts, dim=1) if parts else self._table[:, :0]
