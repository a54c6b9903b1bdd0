"""Look-ahead layer: its product on a GPU, and absent tokens. The contract of flows has the rest."""

from __future__ import annotations

import torch
from torch import nn

from token2wav.config.token_format import NO_TOKEN
from token2wav.layers.lookahead import as_product, convolved, embed_tokens


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
