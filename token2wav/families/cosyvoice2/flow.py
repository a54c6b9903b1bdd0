"""Flow of CosyVoice2 and its relatives as one module, with the parameter names of public `flow.pt`
files.
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
    """Base of the flows of CosyVoice's kind. All project speakers in the same way, and have their
    estimator below `decoder.`.

    Attributes:
        token_bytes: bytes of state per token of a stream.
    """

    spk_embed_affine_layer: nn.Linear
    decoder: nn.ModuleDict
    token_bytes = 0

    @property
    def estimator(self) -> EstimatorT:
        return self.decoder["estimator"]  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self.spk_embed_affine_layer.weight.device

    def speaker(self, embedding: torch.Tensor) -> torch.Tensor:
        """Projects a speaker embedding (..., spk_embed_dim) to a speaker vector (..., bands)."""
        return self.spk_embed_affine_layer(F.normalize(embedding, dim=-1))


@dataclass(eq=False)
class EncoderState:
    """State of a stream in the encoder.

    Attributes:
        state: state of the layers of the conformer.
        mask: attention mask, in tokens; None for full attention.
    """

    state: ConformerState
    mask: BlockMask | None


class Flow(FlowNetwork[EstimatorT]):
    """Flow: token embedding, conformer encoder, speaker projection and an estimator
    (CausalMaskedDiffWithXvec).

    Args:
        config: sizes of all parts except the estimator.
        estimator: estimator of the velocity.
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
        """Returns the state of a stream before its first token.

        Args:
            voice: voice of the stream.
            mask: attention mask, in frames; None for full attention, under which a stream is one
                chunk.
        """
        return EncoderState(ConformerState(self.encoder), in_tokens(mask))

    def fork(self, state: EncoderState, mask: BlockMask | None) -> EncoderState:
        """Copies the state after a shared prefix, for a stream that continues from there under its
        own mask.
        """
        return EncoderState(state.state.fork(), in_tokens(mask))

    def encode(self, batch: Sequence[tuple[EncoderState, TokenChunk]]) -> list[torch.Tensor]:
        """Computes the conditions (bands, frames) of chunks, each after the state of its stream.
        Every state is advanced to the end of its chunk.

        Chunks are computed one by one. Their pasts have different lengths, and the ten ODE steps of
        the estimator cost much more.
        """
        return [self._encoded(state, chunk) for state, chunk in batch]

    def _encoded(self, state: EncoderState, chunk: TokenChunk) -> torch.Tensor:
        embedded = self.input_embedding(torch.tensor(chunk.tokens, device=self.device))[None]
        hidden = self.encoder(embedded, state.mask, state.state, left=chunk.left, last=chunk.last)
        return self.encoder_proj(hidden)[0].T


def in_tokens(mask: BlockMask | None) -> BlockMask | None:
    """Converts a mask in frames to a mask in tokens."""
    return mask and replace(mask, block_frames=mask.block_frames // RATIO)


def cosyvoice2_flow(config: FlowConfig[UNetConfig], *, mean_flow: bool = False) -> Flow[UNet]:
    """Makes the flow of CosyVoice2 or Chatterbox, without weights; Turbo has a mean flow."""
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
