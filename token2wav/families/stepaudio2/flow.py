"""Flow of Step-Audio2, with the parameter names of public `flow.pt` files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from token2wav.execution.stages import TokenChunk
from token2wav.families.cosyvoice2.config import FlowConfig
from token2wav.families.cosyvoice2.flow import EncoderState, Flow, in_tokens
from token2wav.families.stepaudio2.config import SILENCE, DiTConfig
from token2wav.networks.conformer import ConformerState
from token2wav.networks.lookahead import convolved
from token2wav.networks.masks import BlockMask
from token2wav.networks.step_audio_dit import StepAudioDiT
from token2wav.voice import Voice


@dataclass(eq=False)
class StepAudioState(EncoderState):
    """State of a stream whose prompt is encoded as if silence followed it.

    Attributes:
        prompt: number of prompt tokens.
        tail: (1, hidden, lookbehind) last inputs of the second convolution of the look-ahead layer.
    """

    prompt: int
    tail: torch.Tensor


class StepAudioFlow(Flow[StepAudioDiT]):
    """Flow: token embedding, conformer encoder, speaker projection and a DiT.

    In streams the prompt is encoded with silence as its look-ahead, so that its encoding depends on
    the voice alone. A whole utterance under full attention is encoded in one piece, as in the
    public code.
    """

    def start(self, voice: Voice, mask: BlockMask | None) -> EncoderState:
        own, prompt = in_tokens(mask), len(voice.prompt_tokens)
        if own is None:
            return super().start(voice, mask)
        conv = self.encoder.pre_lookahead_layer.conv2
        tail = conv.weight.new_zeros(
            1, conv.in_channels, self.encoder.pre_lookahead_layer.lookbehind
        )
        state = ConformerState(self.encoder, start=-prompt % own.block_frames)
        return StepAudioState(state, own, prompt, tail)

    def fork(self, state: EncoderState, mask: BlockMask | None) -> EncoderState:
        forked = super().fork(state, mask)
        assert isinstance(state, StepAudioState)
        return StepAudioState(forked.state, forked.mask, state.prompt, state.tail)

    def _encoded(self, state: EncoderState, chunk: TokenChunk) -> torch.Tensor:
        if not isinstance(state, StepAudioState):
            return super()._encoded(state, chunk)
        tokens, parts = chunk.tokens[chunk.left :], []
        if (prompt := state.prompt - chunk.start) > 0:
            silence = np.full(self.encoder.pre_lookahead_layer.lookahead, SILENCE, np.int32)
            parts.append(
                self._seen_ahead(state, np.concatenate((tokens[:prompt], silence)), last=False)
            )
            tokens = tokens[prompt:]
        if chunk.stop > state.prompt:
            parts.append(self._seen_ahead(state, tokens, last=chunk.last))
        hidden = self.encoder.encode(torch.cat(parts, dim=1), state.mask, state.state)
        return self.encoder_proj(hidden)[0].T

    def _seen_ahead(
        self, state: StepAudioState, tokens: NDArray[np.int32], *, last: bool
    ) -> torch.Tensor:
        """Computes the look-ahead layer (1, n, C) of the next tokens, and updates the last inputs
        of its second convolution.
        """
        layer = self.encoder.pre_lookahead_layer
        x = self.encoder.embed(self.input_embedding(torch.tensor(tokens, device=self.device))[None])
        h = F.pad(x.transpose(1, 2), (0, layer.lookahead if last else 0))
        h = torch.cat((state.tail, F.leaky_relu(convolved(layer.conv1, h))), dim=2)
        state.tail = h[:, :, h.shape[2] - layer.lookbehind :]
        y = convolved(layer.conv2, h).transpose(1, 2)
        return y + x[:, : y.shape[1]]


def stepaudio2_flow(config: FlowConfig[DiTConfig]) -> StepAudioFlow:
    """Makes the flow of Step-Audio2, without weights."""
    dit = config.estimator
    return StepAudioFlow(
        config,
        StepAudioDiT(config.mel_bands, dit.hidden_size, dit.num_heads, dit.head_dim, dit.depth),
    )
