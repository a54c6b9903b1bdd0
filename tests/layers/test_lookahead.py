"""Look-ahead layer: absent tokens are zeros. The contract of flows tests its streams."""

from __future__ import annotations

import torch
from torch import nn

from token2wav.config.token_format import NO_TOKEN
from token2wav.layers.lookahead import embed_tokens


def test_an_absent_token_is_zero() -> None:
    embedding = nn.Embedding(4, 3)
    embedded = embed_tokens(embedding, torch.tensor([[2, NO_TOKEN]]))
    assert torch.equal(embedded[0, 0], embedding.weight[2])
    assert not embedded[0, 1].any()
    frames = torch.tensor([[[1, 2], [NO_TOKEN, NO_TOKEN]]])
    summed = embed_tokens(lambda codes: embedding(codes).sum(dim=-2), frames, codebooks=2)
    assert torch.equal(summed[0, 0], embedding.weight[1] + embedding.weight[2])
    assert not summed[0, 1].any()
