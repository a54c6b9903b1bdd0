"""Decoder of a residual vector quantizer: it sums one entry of each codebook for every frame."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Quantizer(nn.Module):
    """Semantic and acoustic codebooks.

    The first codebooks (semantic) hold the content of speech, the others (acoustic) the rest of the
    sound. Each group has its own projection. The results are summed.

    Args:
        dim: length of an entry.
        width: channels of the result.
        projected: whether to project the sum of the entries even if `dim` equals `width`.
    """

    def __init__(
        self, count: int, semantic: int, size: int, dim: int, width: int, *, projected: bool = False
    ) -> None:
        super().__init__()
        self.semantic, self.acoustic = (
            Codebooks(number, size, dim, width, projected=projected)
            for number in (semantic, count - semantic)
        )
        self._semantic = semantic

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Converts codes (B, codebooks, T), -1 in codebooks that a stream does not send, to latents
        (B, width, T).
        """
        return self.semantic(codes[:, : self._semantic]) + self.acoustic(codes[:, self._semantic :])


class Codebooks(nn.Module):
    """Codebooks of one kind, with the projection of their sum."""

    def __init__(self, count: int, size: int, dim: int, width: int, *, projected: bool) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.empty(count, size, dim))
        self.output_proj = nn.Linear(dim, width, bias=False) if projected or dim != width else None

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Converts codes (B, count, T), -1 for none, to (B, width, T)."""
        count, size, _ = self.entries.shape
        first = size * torch.arange(count, device=codes.device)[:, None]
        entries = F.embedding(codes.clamp(min=0) + first, self.entries.flatten(0, 1))
        total = (entries * (codes >= 0)[..., None]).sum(dim=1)  # (B, T, dim)
        latents = total if self.output_proj is None else self.output_proj(total)
        return latents.transpose(1, 2)


class MeanEmbedding(nn.Embedding):
    """Embedding of codes that are averaged. All codebooks have their entries in one table."""

    def __init__(self, count: int, size: int, width: int) -> None:
        super().__init__(count * size, width)
        self._size = size

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Converts codes (B, count, T) to (B, T, width)."""
        first = self._size * torch.arange(codes.shape[1], device=codes.device)[:, None]
        return super().forward(codes + first).mean(1)


class ProjectedCodebooks(nn.Module):
    """Codebooks with short entries, each with a projection of its own. The results are summed."""

    def __init__(self, count: int, size: int, dim: int, width: int) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.empty(count, size, dim))
        self.weight = nn.Parameter(torch.empty(count, dim, width))
        self.bias = nn.Parameter(torch.empty(count, width))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Converts codes (B, count, T) to latents (B, width, T). A codebook that a stream does not
        send has the code -1, and adds neither an entry nor its bias.
        """
        count, size, _ = self.entries.shape
        first = size * torch.arange(count, device=codes.device)[:, None]
        sent = (codes >= 0).to(self.entries.dtype)
        entries = F.embedding(codes.clamp(min=0) + first, self.entries.flatten(0, 1))
        latents = torch.einsum("bktd,kdw->bwt", entries * sent[..., None], self.weight)
        return latents + torch.einsum("bkt,kw->bwt", sent, self.bias)
