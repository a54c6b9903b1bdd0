"""Flow of CosyVoice2 and its relatives as one module, with the parameter names of public `flow.pt`
files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from token2wav.execution.staging import to_device
from token2wav.families.cosyvoice2 import FlowConfig
from token2wav.families.flow_network import ChunkedFlow, EstimatorT
from token2wav.layers.lookahead import embed_tokens
from token2wav.layers.streaming import StreamStep
from token2wav.networks.conformer import Conformer, ConformerAttention, SequenceAttention
from token2wav.networks.unet import UNet
from token2wav.published.sizes import UNetConfig
from token2wav.stages.stage import EncoderInput


class Flow(ChunkedFlow[EstimatorT]):
    """Flow with a token embedding, a conformer encoder, a speaker projection and an estimator. Its
    public class is CausalMaskedDiffWithXvec.

    Args:
        config: sizes of all parts except the estimator.
    """

    def __init__(self, config: FlowConfig[Any], estimator: EstimatorT) -> None:
        super().__init__()
        sizes = config.encoder
        self.input_embedding = nn.Embedding(config.vocab_size, sizes.size)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, config.mel_bands)
        self.encoder = Conformer(sizes, config.pre_lookahead_len, config.token_mel_ratio)
        self.encoder_proj = nn.Linear(sizes.size, config.mel_bands)
        self.decoder = nn.ModuleDict({"estimator": estimator})
        self.key_value_specs = self.encoder.key_value_specs
        self.lookahead, self.mel_bands = config.pre_lookahead_len, config.mel_bands
        self.lookbehind, self.token_mel_ratio = self.encoder.lookbehind, config.token_mel_ratio
        self.attention_heads = sizes.heads, sizes.size // sizes.heads

    def _encoded(self, encoder_input: EncoderInput, step: StreamStep) -> torch.Tensor:
        x = self._embedded(encoder_input.chunk.tokens)
        attention = SequenceAttention(encoder_input.grid, encoder_input.context)
        hidden = self.encoder(x, attention, step, last=encoder_input.chunk.last)
        return self.encoder_proj(hidden)[0].T

    def encode_blocks(
        self, tokens: torch.Tensor, step: StreamStep, attention: ConformerAttention
    ) -> torch.Tensor:
        """Computes mu (rows, bands, frames) of blocks; see `Encoder`."""
        x = embed_tokens(self._embed, tokens)
        return self.encoder_proj(self.encoder(x, attention, step, last=False)).transpose(1, 2)

    def _embedded(self, tokens: NDArray[np.int32]) -> torch.Tensor:
        """Embeds tokens (n,) to (1, n, size)."""
        return embed_tokens(self._embed, to_device(tokens[None], self.device))

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.encoder.embed(self.input_embedding(tokens))


def cosyvoice2_flow(config: FlowConfig[UNetConfig], *, mean_flow: bool = False) -> Flow[UNet]:
    """Makes the flow of CosyVoice2 or Chatterbox, without weights.

    Args:
        mean_flow: whether the estimator also takes the end of each ODE step, as in Chatterbox
            Turbo.
    """
    block_frames = config.token_mel_ratio * config.block_tokens
    return Flow(config, UNet(config.mel_bands, config.estimator, block_frames, mean_flow=mean_flow))
