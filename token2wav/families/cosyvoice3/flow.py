"""Flow of CosyVoice3 as one module, with the parameter names of public `flow.pt` files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from token2wav.execution.stages import TokenChunk
from token2wav.families.cosyvoice2.flow import FlowNetwork
from token2wav.families.cosyvoice3.config import FlowConfig
from token2wav.networks.dit import DiT
from token2wav.networks.grouping import map_grouped
from token2wav.networks.lookahead import PreLookahead
from token2wav.networks.masks import BlockMask
from token2wav.voice import Voice


class Flow(FlowNetwork[DiT]):
    """Flow: token embedding, look-ahead layer, speaker projection and estimator (CosyVoice3's
    CausalMaskedDiffWithDiT).

    It is the `Encoder` of its stage. In StreamFlow attention itself looks ahead, so there is no
    look-ahead layer.
    """

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.input_embedding = token_embedding(config)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, config.mel_bands)
        self.pre_lookahead_layer = (
            PreLookahead(
                config.input_size,
                config.pre_lookahead_channels,
                config.pre_lookahead_len,
                config.lookbehind_len,
            )
            if config.pre_lookahead_len
            else None
        )
        self.decoder = nn.ModuleDict({"estimator": DiT(config.estimator)})

    def start(self, voice: Voice, mask: BlockMask | None) -> None:
        """Returns no state, because a chunk includes the tokens before it that it depends on."""

    def fork(self, state: None, mask: BlockMask) -> None:
        """Copies a state; there is none."""

    def encode(self, batch: Sequence[tuple[None, TokenChunk]]) -> list[torch.Tensor]:
        """Computes the conditions (bands, frames) of the tokens of every chunk."""
        chunks = [chunk for _, chunk in batch]
        if self.device.type == "cpu":
            # One by one, which is no slower on a CPU. So the rounding does not depend on other
            # chunks of the batch.
            return [self._encode_alike([chunk])[0] for chunk in chunks]
        return map_grouped(
            chunks, lambda chunk: (len(chunk.tokens), chunk.left, chunk.last), self._encode_alike
        )

    def _encode_alike(self, alike: Sequence[TokenChunk]) -> list[torch.Tensor]:
        tokens = torch.tensor(np.stack([chunk.tokens for chunk in alike]), device=self.device)
        return list(self.conditions(tokens, left=alike[0].left, last=alike[0].last))

    def conditions(self, tokens: torch.Tensor, *, left: int = 0, last: bool = True) -> torch.Tensor:
        """Computes the conditions of windows of tokens, equal to the same part of the conditions of
        whole utterances.

        Args:
            tokens: (B, left + n + right) integers, or (B, left + n + right, codebooks); `right` is
                the look-ahead, or 0 if `last`.
            left: number of leading tokens that are context only (see `PreLookahead`).
            last: whether the utterances end with these windows.

        Returns:
            mu, (B, mel_bands, ratio * n).
        """
        embedded = self.input_embedding(tokens)  # (B, T, C)
        if self.pre_lookahead_layer is None:
            hidden = embedded[:, left:]
        else:
            hidden = self.pre_lookahead_layer(embedded, left=left, last=last)  # (B, n, C)
        return hidden.repeat_interleave(self.config.token_mel_ratio, dim=1).transpose(1, 2)


def token_embedding(config: FlowConfig) -> nn.Embedding:
    """Makes the embedding of the tokens of a flow; its one parameter is called `weight`."""
    books = config.codebooks
    if books is None:
        return nn.Embedding(config.vocab_size, config.input_size)
    return CodebookEmbedding(
        books.count, config.vocab_size, config.input_size, concat=books.merge == "concat"
    )


class CodebookEmbedding(nn.Embedding):
    """Embedding of tokens that consist of several codes. One table holds the vocabularies of all
    codebooks, one after the other.

    Args:
        codebooks: number of codes of a token.
        vocab_size: vocabulary of each codebook.
        size: size of the embedding of a token.
        concat: whether the embeddings of the codes are concatenated; else they are added.
    """

    def __init__(self, codebooks: int, vocab_size: int, size: int, *, concat: bool) -> None:
        super().__init__(codebooks * vocab_size, size // codebooks if concat else size)
        self._first = [vocab_size * codebook for codebook in range(codebooks)]
        self._concat = concat

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeds tokens (..., codebooks) to (..., size)."""
        each = super().forward(
            tokens + torch.tensor(self._first, dtype=tokens.dtype, device=tokens.device)
        )
        return each.flatten(-2) if self._concat else each.sum(dim=-2)
