"""Decoder of a residual vector quantizer: it sums one entry of each codebook for every frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.errors import CheckpointError

_LEAST_USAGE = 1e-5  # lower bound of a usage count, by which the sum of an entry is divided


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


def stacked_projections(
    books: dict[int, dict[str, torch.Tensor]], names: Sequence[str], path: Path
) -> dict[str, torch.Tensor]:
    """Joins the tensors of codebooks with projections to the weights of `ProjectedCodebooks`.
    Raises CheckpointError as `stacked_parts`.

    Args:
        names: names of the entries (size, dim), the projection (width, dim[, 1]), and its bias
            (width,).
    """
    entries, weight, bias = stacked_parts(books, names, path)
    # (count, width, dim[, 1]) to (count, dim, width)
    weight = weight.flatten(2).transpose(1, 2) if weight.dim() > 2 else weight
    return {"entries": entries, "weight": weight, "bias": bias}


def stacked_parts(
    books: dict[int, dict[str, torch.Tensor]], names: Sequence[str], path: Path
) -> list[torch.Tensor]:
    """Joins the tensors of codebooks, one tensor for each name. Raises CheckpointError if a
    codebook is missing or incomplete, or shapes differ.
    """
    stacked: list[torch.Tensor] = []
    for name in names:
        column = [books.get(number, {}).get(name) for number in range(len(books))]
        tensors = [value.float() for value in column if value is not None]
        if len(tensors) < len(column):
            raise CheckpointError(f"{path}: codebook {column.index(None)} lacks {name}")
        if len({value.shape for value in tensors}) > 1:
            raise CheckpointError(f"{path}: {name} has different shapes in the codebooks")
        stacked.append(torch.stack(tensors) if tensors else torch.empty(0))
    return stacked


def stacked_entries(
    books: dict[int, dict[str, torch.Tensor]], total: str, usage: str, kind: str, path: Path
) -> torch.Tensor:
    """Computes the entries (count, size, dim) float32 of codebooks. Raises CheckpointError as
    `stacked_parts`.

    Files store for each entry the sum of its training vectors and their number. The entry is the
    quotient.

    Args:
        kind: name of the codebooks, for messages.
    """
    entries = []
    for number in range(len(books)):
        book = books.get(number, {})
        if not {total, usage} <= book.keys():
            raise CheckpointError(f"{path}: a codebook ({kind}) lacks {total} or {usage}")
        sums, uses = book[total].float(), book[usage].float()
        if sums.dim() != 2 or uses.shape != sums.shape[:1]:
            raise CheckpointError(
                f"{path}: a codebook ({kind}) has {total} {tuple(sums.shape)} and {usage} "
                f"{tuple(uses.shape)}"
            )
        entries.append(sums / uses.clamp(min=_LEAST_USAGE)[:, None])
    if len({value.shape for value in entries}) != 1:
        raise CheckpointError(f"{path}: the codebooks ({kind}) have different shapes")
    return torch.stack(entries)
