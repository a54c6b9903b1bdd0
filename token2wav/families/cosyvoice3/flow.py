"""The flow model as one module, with the parameter names of public `flow.pt` files."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.families.cosyvoice3.config import FlowConfig
from token2wav.networks.dit import DiT
from token2wav.networks.lookahead import PreLookahead, token_embedding


class _Decoder(nn.Module):
    """Only a name: public checkpoints keep the estimator under `decoder.`."""

    def __init__(self, estimator: DiT) -> None:
        super().__init__()
        self.estimator = estimator


class Flow(nn.Module):
    """Token embedding, look-ahead, speaker projection and estimator (CosyVoice3's CausalMaskedDiffWithDiT).

    With guided attention (StreamFlow) the look-ahead is that of attention, and tokens are embedded and repeated only.
    """

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.input_embedding = token_embedding(config)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, config.mel_bands)
        self.pre_lookahead_layer = (
            PreLookahead(
                config.input_size, config.pre_lookahead_channels, config.pre_lookahead_len, config.lookbehind_len
            )
            if config.guided is None
            else None
        )
        self.decoder = _Decoder(DiT(config.estimator))

    @property
    def estimator(self) -> DiT:
        return self.decoder.estimator

    def condition(self, tokens: torch.Tensor, *, left: int = 0, last: bool = True) -> torch.Tensor:
        """Conditioning of one window of tokens, (T,) or (T, codebooks), see `conditions`; (mel_bands, ratio * n)."""
        return self.conditions(tokens[None], left=left, last=last)[0]

    def conditions(self, tokens: torch.Tensor, *, left: int = 0, last: bool = True) -> torch.Tensor:
        """Conditioning of windows of tokens, equal to those parts of the whole utterances'.

        Args:
            tokens: (B, left + n + right) integers, or (B, left + n + right, codebooks); `right` is the look-ahead, or 0
                if `last`.
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

    def speaker(self, embedding: torch.Tensor) -> torch.Tensor:
        """Speaker embedding (..., 192) to the estimator's speaker vector (..., mel_bands)."""
        return self.spk_embed_affine_layer(F.normalize(embedding, dim=-1))
