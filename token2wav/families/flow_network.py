"""Bases of the flow networks of several families."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from token2wav.config.block_grid import BlockGrid
from token2wav.layers.streaming import OFFLINE, KeyValueSpec, StateSpec, StreamStep, state_specs
from token2wav.networks.estimator import Estimator
from token2wav.stages.stage import EncoderInput, TokenChunk

EstimatorT = TypeVar("EstimatorT", bound=Estimator)


class FlowNetwork(nn.Module, Generic[EstimatorT]):
    """Base of the flows of CosyVoice2, CosyVoice3 and their relatives. They project speaker
    embeddings in the same way, and their parameters of the estimator have names below `decoder.`.
    """

    spk_embed_affine_layer: nn.Linear
    decoder: nn.ModuleDict
    mel_bands: int

    @property
    def estimator(self) -> EstimatorT:
        return self.decoder["estimator"]  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self.spk_embed_affine_layer.weight.device

    def speaker(self, embedding: torch.Tensor) -> torch.Tensor:
        """Projects a speaker embedding (..., spk_embed_dim) to a speaker vector (..., bands)."""
        return self.spk_embed_affine_layer(F.normalize(embedding, dim=-1))


class ChunkedFlow(FlowNetwork[EstimatorT], ABC):
    """Base of the flows with an encoder of chunks, see `Encoder`.

    Attributes:
        key_value_specs, lookahead, lookbehind, token_shape, token_mel_ratio, attention_heads: sizes
            of the encoder, see `Encoder`.
    """

    key_value_specs: tuple[KeyValueSpec, ...] = ()
    lookahead: int
    lookbehind: int
    token_mel_ratio: int
    token_shape: tuple[int, ...] = ()
    attention_heads: tuple[int, int] = (0, 0)

    def encode(
        self, batch: Sequence[EncoderInput], states: Mapping[nn.Module, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Computes mu (bands, frames) of chunks; see `Encoder.encode`.

        Chunks are computed one by one, because their pasts have different lengths, and so that the
        rounding of a chunk does not depend on the others. A batch of blocks has no such limit, see
        `encode_blocks`.
        """
        steps = [OFFLINE] * len(batch)
        if states is not None:
            steps = [
                StreamStep({layer: rows[row : row + 1] for layer, rows in states.items()})
                for row in range(len(batch))
            ]
        return [self._encoded(chunk, step) for chunk, step in zip(batch, steps, strict=True)]

    @abstractmethod
    def _encoded(self, encoder_input: EncoderInput, step: StreamStep) -> torch.Tensor:
        """Computes mu (bands, frames) of one chunk."""

    def with_lookahead(self, chunk: TokenChunk, grid: BlockGrid) -> NDArray[np.int32]:
        """Returns the tokens of a chunk and its look-ahead; see `Encoder`."""
        return chunk.tokens

    def state_specs(self) -> dict[nn.Module, StateSpec]:
        """Returns the states of the streaming layers of the encoder."""
        return state_specs(self)
