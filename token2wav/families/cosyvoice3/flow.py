"""Flow of CosyVoice3 as one module, with the parameter names of public `flow.pt` files."""

from __future__ import annotations

import torch
from torch import nn

from token2wav.execution.staging import to_device
from token2wav.families.cosyvoice3 import FlowConfig
from token2wav.families.flow_network import ChunkedFlow
from token2wav.layers.lookahead import PreLookahead, embed_tokens
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.conformer import ConformerAttention
from token2wav.networks.dit import DiT
from token2wav.stages.stage import EncoderInput


class Flow(ChunkedFlow[DiT]):
    """Flow with a token embedding, a look-ahead layer, a speaker projection and an estimator. Its
    public class is CausalMaskedDiffWithDiT.

    It implements `Encoder`. StreamFlow has no look-ahead layer, because its attention reads later
    blocks.
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
        self.lookahead, self.lookbehind = config.pre_lookahead_len, config.lookbehind_len
        self.token_shape = config.tokens.shape
        self.mel_bands, self.token_mel_ratio = config.mel_bands, config.token_mel_ratio

    def _encoded(self, encoder_input: EncoderInput, step: StreamStep) -> torch.Tensor:
        """Computes mu (bands, frames) of one chunk. The encoder has no attention, so it reads
        neither the grid nor the context of its input.
        """
        chunk = encoder_input.chunk
        return self.mu(to_device(chunk.tokens[None], self.device), step, last=chunk.last)[0]

    def mu(
        self, tokens: torch.Tensor, step: StreamStep = OFFLINE, *, last: bool = True
    ) -> torch.Tensor:
        """Computes mu of the next tokens of streams. It equals the same part of mu of whole
        utterances.

        Args:
            tokens: (B, n + right) integers, or (B, n + right, codebooks); `right` is the
                look-ahead, or 0 if `last`.
            step: state of the streams; `OFFLINE` for whole utterances.
            last: whether the utterances end with these tokens.

        Returns:
            mu, (B, mel_bands, ratio * n).
        """
        # Only look-ahead can be missing.
        embedded = self._embedded(tokens) if self.lookahead else self.input_embedding(tokens)
        return self._mu(embedded, step, last=last)

    def unconditional(self) -> torch.Tensor:
        """Returns the projected conditions (dim,) of a frame of an unconditional row, in which all
        conditions are zero.
        """
        return self.estimator.input_embed.proj.bias

    def encode_blocks(
        self, tokens: torch.Tensor, step: StreamStep, attention: ConformerAttention
    ) -> torch.Tensor:
        """Computes mu (rows, bands, frames) of blocks; see `Encoder`. The encoder
        has no attention.
        """
        return self._mu(self._embedded(tokens), step, last=False)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeds tokens (B, n), or (B, n, codebooks), to (B, n, C)."""
        return embed_tokens(self.input_embedding, tokens, *self.token_shape)

    def _mu(self, hidden: torch.Tensor, step: StreamStep, *, last: bool) -> torch.Tensor:
        """Computes mu from embedded tokens (B, n + right, C)."""
        if self.pre_lookahead_layer is not None:
            hidden = self.pre_lookahead_layer(hidden, step, last=last)
        return hidden.repeat_interleave(self.config.token_mel_ratio, dim=1).transpose(1, 2)


def token_embedding(config: FlowConfig) -> nn.Embedding:
    """Makes the embedding layer of the tokens of a flow. Its only parameter is `weight`."""
    books = config.codebooks
    if books is None:
        return nn.Embedding(config.vocab_size, config.input_size)
    return CodebookEmbedding(
        books.count, config.vocab_size, config.input_size, concat=books.merge == "concat"
    )


class CodebookEmbedding(nn.Embedding):
    """Embedding layer of tokens that consist of several codes. Its table holds the vocabularies of
    all codebooks, one after the other.

    Args:
        codebooks: codes of a token.
        vocab_size: vocabulary of each codebook.
        size: channels of the embedding of a token.
        concat: whether the embeddings of the codes are concatenated; else they are added.
    """

    def __init__(self, codebooks: int, vocab_size: int, size: int, *, concat: bool) -> None:
        super().__init__(codebooks * vocab_size, size // codebooks if concat else size)
        self._codebooks, self._vocab_size = codebooks, vocab_size
        self._concat = concat

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeds tokens (..., codebooks) to (..., size)."""
        # made on the device, so that no copy of numbers of the host is waited for
        first = torch.arange(self._codebooks, dtype=tokens.dtype, device=tokens.device)
        embeddings = super().forward(tokens + self._vocab_size * first)
        return embeddings.flatten(-2) if self._concat else embeddings.sum(dim=-2)
