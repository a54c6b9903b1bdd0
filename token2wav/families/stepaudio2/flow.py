"""Flow of Step-Audio2, with the parameter names of public `flow.pt` files."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.config.block_grid import BlockGrid
from token2wav.families.cosyvoice2 import FlowConfig
from token2wav.families.cosyvoice2.flow import Flow
from token2wav.families.stepaudio2 import SILENCE, DiTConfig
from token2wav.layers.streaming import StreamStep
from token2wav.networks.conformer import SequenceAttention
from token2wav.networks.step_audio_dit import StepAudioDiT
from token2wav.stages.stage import EncoderInput, TokenChunk


class StepAudioFlow(Flow[StepAudioDiT]):
    """Flow with a token embedding, a conformer encoder, a speaker projection and a DiT.

    In streams the look-ahead of the prompt is silence instead of the first tokens of the utterance,
    so that the encoding of the prompt depends on the voice alone. Under full attention a whole
    utterance is encoded in one piece, as in the public code.
    """

    def _encoded(self, encoder_input: EncoderInput, step: StreamStep) -> torch.Tensor:
        chunk, lookahead = encoder_input.chunk, self.encoder.pre_lookahead_layer
        if encoder_input.grid is None:
            return super()._encoded(encoder_input, step)
        # A whole utterance also needs a state, because its prompt and the rest are two parts.
        if step.state is None:
            step = StreamStep(
                {
                    layer: torch.zeros(1, *spec.shape, dtype=spec.dtype, device=self.device)
                    for layer, spec in self.state_specs().items()
                }
            )
        prompt = max(0, encoder_input.grid.prompt - chunk.start)
        parts = []
        if prompt:
            parts.append((self._with_silence(chunk.tokens[:prompt]), False))
        if chunk.stop > encoder_input.grid.prompt:
            parts.append((chunk.tokens[prompt:], chunk.last))
        outputs = [lookahead(self._embedded(tokens), step, last=last) for tokens, last in parts]
        attention = SequenceAttention(encoder_input.grid, encoder_input.context)
        hidden = self.encoder.encode(torch.cat(outputs, dim=1), attention, step)
        return self.encoder_proj(hidden)[0].T

    def with_lookahead(self, chunk: TokenChunk, grid: BlockGrid) -> NDArray[np.int32]:
        """Returns the tokens of a chunk and its look-ahead. A chunk of a stream lies either in the
        prompt or after it.
        """
        if chunk.start >= grid.prompt:
            return chunk.tokens
        return self._with_silence(chunk.tokens[: chunk.stop - chunk.start])

    def _with_silence(self, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the tokens of a prompt, and silence as its look-ahead."""
        return np.concatenate((prompt, np.full(self.lookahead, SILENCE, np.int32)))


def stepaudio2_flow(config: FlowConfig[DiTConfig]) -> StepAudioFlow:
    """Makes the flow of Step-Audio2, without weights."""
    dit = config.estimator
    return StepAudioFlow(
        config,
        StepAudioDiT(config.mel_bands, dit.hidden_size, dit.num_heads, dit.head_dim, dit.depth),
    )
