"""Look-ahead layer: chunks equal the whole, and tokens that have not arrived are zeros."""

from __future__ import annotations

import torch
from torch import nn

from token2wav.config.token_format import NO_TOKEN
from token2wav.layers.lookahead import PreLookahead, as_product, convolved, embed_tokens
from token2wav.layers.streaming import StreamStep, state_specs


@torch.inference_mode()
def test_chunks_equal_the_whole() -> None:
    torch.manual_seed(0)
    layer, x = PreLookahead(6, 8, lookahead=3, lookbehind=2), torch.randn(2, 25, 6)
    whole = layer(x)
    [(conv, spec)] = state_specs(layer).items()
    state = {conv: torch.zeros(2, *spec.shape)}
    stops, parts = (4, 5, 17, 25), []
    for start, stop in zip((0, *stops), stops, strict=False):
        last = stop == 25
        part = x[:, start : stop + (0 if last else 3)]
        parts.append(layer(part, StreamStep(state, first=not start), last=last))
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-6)


def test_a_convolution_is_a_product() -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv1d(4, 5, 3), torch.randn(2, 4, 11)
    assert torch.allclose(as_product(conv, x), convolved(conv, x), atol=1e-6)


def test_an_absent_token_is_zero() -> None:
    embedding = nn.Embedding(4, 3)
    embedded = embed_tokens(embedding, torch.tensor([[2, NO_TOKEN]]))
    assert torch.equal(embedded[0, 0], embedding.weight[2])
    assert not embedded[0, 1].any()
    frames = torch.tensor([[[1, 2], [NO_TOKEN, NO_TOKEN]]])
    summed = embed_tokens(lambda codes: embedding(codes).sum(dim=-2), frames, codebooks=2)
    assert torch.equal(summed[0, 0], embedding.weight[1] + embedding.weight[2])
    assert not summed[0, 1].any()
