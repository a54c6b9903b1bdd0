"""The flow model as one module, with the parameter names of public `flow.pt` files."""

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
    """Token embedding, look-ahead, speaker projection and estimator (CosyVoice3's
    CausalMaskedDiffWithDiT).

    It is the `Encoder` of its stage. Where attention looks ahead (StreamFlow), tokens are embedded
    and repeated only.
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
        """State of a stream: there is none, as chunks come with the tokens before them."""

    def fork(self, state: None, mask: BlockMask) -> None:
        """Copy of no state."""

    def encode(self, batch: Sequence[tuple[None, TokenChunk]]) -> list[torch.Tensor]:
        """Conditions (bands, frames) that the tokens of every chunk make."""
        chunks = [chunk for _, chunk in batch]
        if self.device.type == "cpu":
            # One by one, which costs no more here: so the rounding does not depend on who else is
            # in the batch.
            return [self._encode_alike([chunk])[0] for chunk in chunks]
        return map_grouped(
            chunks, lambda chunk: (len(chunk.tokens), chunk.left, chunk.last), self._encode_alike
        )

    def _encode_alike(self, alike: Sequence[TokenChunk]) -> list[torch.Tensor]:
        tokens = torch.tensor(np.stack([chunk.tokens for chunk in alike]), device=self.device)
        return list(self.conditions(tokens, left=alike[0].left, last=alike[0].last))

    def conditions(self, tokens: torch.Tensor, *, left: int = 0, last: bool = True) -> torch.Tensor:
        """Conditioning of windows of tokens, equal to those parts of the whole utterances'.

        Args:
            tokens: (B, left + n + right) integers, or (B, left + n + right, codebooks); `right` is
                the look-ahead, or 0 if `last`.
            left: leading tokens that are context only (see `PreLookahead`).
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
    """Embedding of a flow's tokens; its one parameter is called `weight`."""
    books = config.codebooks
    if books is None:
        return nn.Embedding(config.vocab_size, config.input_size)
    return CodebookEmbedding(
        books.count, config.vocab_size, config.input_size, concat=books.merge == "concat"
    )


class CodebookEmbedding(nn.Embedding):
    """Tokens of several codes: one table, in which the vocabularies stand one below the other,
    codebook by codebook.

    Args:
        codebooks: codes of a token.
        vocab_size: of each codebook.
        size: of a token's embedding.
        concat: whether those of its codes stand one behind the other; else they are added.
    """

    def __init__(self, codebooks: int, vocab_size: int, size: int, *, concat: bool) -> None:
        super().__init__(codebooks * vocab_size, size // codebooks if concat else size)
        self._first = [vocab_size * codebook for codebook in range(codebooks)]
        self._concat = concat

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(..., codebooks) integers to (..., size)."""
        each = super().forward(
            tokens + torch.tensor(self._first, dtype=tokens.dtype, device=tokens.device)
        )
        return each.flatten(-2) if self._concat else each.sum(dim=-2)
