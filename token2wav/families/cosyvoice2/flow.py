"""The flow of CosyVoice2 and its relatives as one module, with the parameter names of public
`flow.pt` files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.execution.stages import TokenChunk
from token2wav.families.cosyvoice2.config import FlowConfig, UNetConfig
from token2wav.networks.conformer import RATIO, Conformer, ConformerState
from token2wav.networks.estimator import Estimator
from token2wav.networks.masks import BlockMask
from token2wav.networks.unet import UNet
from token2wav.voice import Voice

EstimatorT = TypeVar("EstimatorT", bound=Estimator)


class FlowNetwork(nn.Module, Generic[EstimatorT]):
    """Base of the flows of CosyVoice's kind, which project speakers alike and keep their estimator
    below `decoder.`.
    """

    spk_embed_affine_layer: nn.Linear
    decoder: nn.ModuleDict
    token_bytes = 0  # that are kept of a token

    @property
    def estimator(self) -> EstimatorT:
        return self.decoder["estimator"]  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self.spk_embed_affine_layer.weight.device

    def speaker(self, embedding: torch.Tensor) -> torch.Tensor:
        """Speaker embedding (..., spk_embed_dim) to the estimator's speaker vector (..., bands)."""
        return self.spk_embed_affine_layer(F.normalize(embedding, dim=-1))


@dataclass(eq=False)
class EncoderState:
    """State of a stream in the encoder.

    Attributes:
        state: of the conformer's layers.
        mask: who sees whom, in tokens; None for full attention.
    """

    state: ConformerState
    mask: BlockMask | None


class Flow(FlowNetwork[EstimatorT]):
    """Token embedding, conformer encoder, speaker projection and an estimator
    (CausalMaskedDiffWithXvec).

    Args:
        config: sizes of all but the estimator.
        estimator: of the velocity.
    """

    def __init__(self, config: FlowConfig[Any], estimator: EstimatorT) -> None:
        super().__init__()
        sizes = config.encoder
        self.input_embedding = nn.Embedding(config.vocab_size, sizes.size)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, config.mel_bands)
        self.encoder = Conformer(
            sizes.size,
            sizes.heads,
            sizes.units,
            sizes.layers,
            sizes.up_layers,
            lookahead=config.pre_lookahead_len,
        )
        self.encoder_proj = nn.Linear(sizes.size, config.mel_bands)
        self.decoder = nn.ModuleDict({"estimator": estimator})
        self.token_bytes = self.encoder.token_bytes

    def start(self, voice: Voice, mask: BlockMask | None) -> EncoderState:
        """State of a stream that begins.

        Args:
            voice: that it speaks with.
            mask: who sees whom, in frames; None for full attention, under which there is one chunk
                only.
        """
        return EncoderState(ConformerState(self.encoder), in_tokens(mask))

    def fork(self, state: EncoderState, mask: BlockMask | None) -> EncoderState:
        """Copy of a state, for a stream that goes on from a prefix which others share, under a mask
        of its own.
        """
        return EncoderState(state.state.fork(), in_tokens(mask))

    def encode(self, batch: Sequence[tuple[EncoderState, TokenChunk]]) -> list[torch.Tensor]:
        """Conditions (bands, frames) of chunks behind the states of their streams, which are taken
        on to their ends.

        Chunks go one by one: their pasts have different lengths, and the ten steps of the estimator
        cost much more.
        """
        return [self._encoded(state, chunk) for state, chunk in batch]

    def _encoded(self, state: EncoderState, chunk: TokenChunk) -> torch.Tensor:
        embedded = self.input_embedding(torch.tensor(chunk.tokens, device=self.device))[None]
        hidden = self.encoder(embedded, state.mask, state.state, left=chunk.left, last=chunk.last)
        return self.encoder_proj(hidden)[0].T


def in_tokens(mask: BlockMask | None) -> BlockMask | None:
    """Mask of tokens, of one of frames."""
    return mask and replace(mask, block_frames=mask.block_frames // RATIO)


def cosyvoice2_flow(config: FlowConfig[UNetConfig], *, mean_flow: bool = False) -> Flow[UNet]:
    """Flow of CosyVoice2, or of Chatterbox, whose Turbo has a mean flow; without weights."""
    sizes, block_frames = config.estimator, RATIO * config.block_tokens
    estimator = UNet(
        config.mel_bands,
        sizes.channels,
        sizes.heads,
        sizes.dim_head,
        sizes.mid_blocks,
        sizes.layers,
        block_frames,
        mean_flow=mean_flow,
    )
    return Flow(config, estimator)
