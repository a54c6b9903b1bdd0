"""From a chunk of tokens to what the ODE starts from: conditions, prompt mel and noise of its frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from token2wav.engines.base import FlowChunk
from token2wav.engines.work import ChunkWork, Past
from token2wav.flow.flow import Flow
from token2wav.flow.noise import FlowNoise
from token2wav.groups import in_groups


class WorkMaker:
    """Makes `ChunkWork`.

    Args:
        flow: on the device that is to be used.
        noise: of the flow.
    """

    def __init__(self, flow: Flow, noise: FlowNoise) -> None:
        self._flow = flow
        self._device = flow.spk_embed_affine_layer.weight.device
        self._noise = noise.to(self._device)

    def conditions(self, chunks: Sequence[FlowChunk]) -> list[torch.Tensor]:
        """What the tokens of chunks say of their frames, (bands, frames) of each."""
        if self._device.type == "cpu":
            # One by one, which costs no more here: so the rounding does not depend on who else is in the batch.
            return [self._condition([chunk])[0] for chunk in chunks]
        return in_groups(chunks, lambda chunk: (len(chunk.tokens), chunk.left, chunk.last), self._condition)

    def work(
        self,
        chunk: FlowChunk,
        mu: torch.Tensor,
        prompt_mel: torch.Tensor,
        speaker: torch.Tensor,
        past: Past,
        new: list[int],
        contexts: torch.Tensor,
    ) -> ChunkWork:
        """A chunk, ready for the ODE.

        Args:
            chunk: to be computed.
            mu: (bands, frames) its conditions.
            prompt_mel: (bands, n) from the utterance's first frame on.
            speaker, past, new, contexts: see `ChunkWork`.
        """
        start, frames = self._flow.config.token_mel_ratio * chunk.start, mu.shape[1]
        cond = torch.zeros_like(mu)
        given = prompt_mel[:, start : start + frames]
        cond[:, : given.shape[1]] = given
        return ChunkWork(self._noise.window(start, start + frames), mu, cond, speaker, start, past, new, contexts)

    def _condition(self, alike: Sequence[FlowChunk]) -> list[torch.Tensor]:
        tokens = torch.tensor(np.stack([chunk.tokens for chunk in alike]), device=self._device)
        return list(self._flow.conditions(tokens, left=alike[0].left, last=alike[0].last))
