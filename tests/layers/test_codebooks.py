"""Codebooks: sums of entries, codes that a stream does not send, and entries of published files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from token2wav.layers.codebooks import (
    ProjectedCodebooks,
    Quantizer,
    stacked_entries,
    stacked_projections,
)

PATH = Path("weights")


def filled(network: Any) -> Any:
    torch.manual_seed(0)
    for parameter in network.requires_grad_(False).parameters():
        parameter.normal_()
    return network


def test_latents_are_sums_of_both_groups() -> None:
    quantizer = filled(Quantizer(3, 1, size=5, dim=2, width=4))
    codes = torch.tensor([[[1, 4], [0, 2], [3, -1]]])
    (semantic, acoustic) = (group.entries for group in (quantizer.semantic, quantizer.acoustic))
    first = quantizer.semantic.output_proj(semantic[0, [1, 4]])
    rest = torch.stack((acoustic[0, 0] + acoustic[1, 3], acoustic[0, 2]))  # -1 adds nothing
    expected = (first + quantizer.acoustic.output_proj(rest)).T[None]
    assert torch.allclose(quantizer(codes), expected, atol=1e-6)


def test_a_codebook_that_is_not_sent_adds_no_bias() -> None:
    books = filled(ProjectedCodebooks(2, size=5, dim=3, width=4))
    both, first = (books(torch.tensor([[[2], [code]]])) for code in (1, -1))
    second = books.entries[1, 1] @ books.weight[1] + books.bias[1]
    assert torch.allclose(both - first, second[None, :, None], atol=1e-6)


def test_entries_are_quotients() -> None:
    books = {0: {"sum": torch.tensor([[4.0, 2.0], [3.0, 3.0]]), "uses": torch.tensor([2.0, 0.0])}}
    entries = stacked_entries(books, "sum", "uses", "semantic", PATH)
    assert entries[0, 0].tolist() == [2.0, 1.0]
    assert entries.isfinite().all()  # an entry without any use, too


def test_projections_of_all_codebooks_in_one_tensor() -> None:
    names = ("book", "out", "bias")
    one = {"book": torch.ones(5, 3), "out": torch.ones(4, 3, 1), "bias": torch.ones(4)}
    stacked = stacked_projections({0: one, 1: one}, names, PATH)
    shapes = {name: tuple(value.shape) for name, value in stacked.items()}
    assert shapes == {"entries": (2, 5, 3), "weight": (2, 3, 4), "bias": (2, 4)}
