"""Flow of CosyVoice2 and its relatives as one module, with the parameter names of public `flow.pt`
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from token2wav.execution.stages import EncoderInput
from token2wav.families.cosyvoice2.config import FlowConfig, UNetConfig
from token2wav.networks.conformer import RATIO, Conformer
from token2wav.networks.estimator import Estimator
from token2wav.networks.staging import to_device
from token2wav.networks.streaming import (
    OFFLINE,
    KeyValueSpec,
    StateSpec,
    StreamStep,
    state_specs,
)
from token2wav.networks.unet import UNet

EstimatorT = TypeVar("EstimatorT", bound=Estimator)


class FlowNetwork(nn.Module, Generic[EstimatorT]):
    """Base of the flows of CosyVoice2, CosyVoice3 and their relatives. They project speaker
    embeddings in the same way, and their parameters of the estimator have names below `decoder.`.

    Attributes:
        key_value_specs: sizes of the keys and values of the encoder, see `Encoder`.
    """

    spk_embed_affine_layer: nn.Linear
    decoder: nn.ModuleDict
    key_value_specs: tuple[KeyValueSpec, ...] = ()

    @property
    def estimator(self) -> EstimatorT:
        return self.decoder["estimator"]  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self.spk_embed_affine_layer.weight.device

    def speaker(self, embedding: torch.Tensor) -> torch.Tensor:
        """Projects a speaker embedding (..., spk_embed_dim) to a speaker vector (..., bands)."""
        return self.spk_embed_affine_layer(F.normalize(embedding, dim=-1))

    def state_specs(self) -> dict[nn.Module, StateSpec]:
        """Returns the states of the streaming layers of the encoder."""
        return state_specs(self)


class Flow(FlowNetwork[EstimatorT]):
    """Flow with a token embedding, a conformer encoder, a speaker projection and an estimator. Its
    public class is CausalMaskedDiffWithXvec.

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
        self.key_value_specs = self.encoder.key_value_specs

    def encode(
        self, batch: Sequence[EncoderInput], states: Mapping[nn.Module, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Computes the conditions (bands, frames) of chunks; see `Encoder.encode`.

        Chunks are computed one by one, because their pasts have different lengths. A batch would
        gain little, because the ten ODE steps of the estimator cost much more than the encoder.
        """
        steps = [OFFLINE] * len(batch)
        if states is not None:
            steps = [
                StreamStep({layer: rows[row : row + 1] for layer, rows in states.items()})
                for row in range(len(batch))
            ]
        return [self._encoded(*each) for each in zip(batch, steps, strict=True)]

    def _encoded(self, given: EncoderInput, step: StreamStep) -> torch.Tensor:
        """Computes the conditions (bands, frames) of one chunk."""
        x = self._embedded(given.chunk.tokens)
        hidden = self.encoder(x, given.grid, step, given.context, last=given.chunk.last)
        return self.encoder_proj(hidden)[0].T

    def _embedded(self, tokens: NDArray[np.int32]) -> torch.Tensor:
        """Embeds tokens (n,) to (1, n, size)."""
        return self.input_embedding(to_device(tokens[None], self.device))


def cosyvoice2_flow(config: FlowConfig[UNetConfig], *, mean_flow: bool = False) -> Flow[UNet]:
    """Makes the flow of CosyVoice2 or Chatterbox, without weights.

    Args:
        config: sizes of the flow.
        mean_flow: whether the estimator also takes the end of each ODE step, as in Chatterbox
            Turbo.
    """
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
