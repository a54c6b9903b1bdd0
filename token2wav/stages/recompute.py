"""Recompute stages, which compute the whole history of a stream again for every chunk. They are
simple, and tests compare all other stages with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.config.model_config import ModelConfig
from token2wav.errors import BackendError
from token2wav.networks.masks import block_mask
from token2wav.networks.noise import FlowNoise, SourceNoise
from token2wav.networks.ode import EulerSolver
from token2wav.networks.source import Phase
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.stages.stage import (
    DEFAULT_OPTIONS,
    Encoder,
    EncoderInput,
    FlowStage,
    StreamOptions,
    TokenChunk,
    VocoderInput,
    VocoderStage,
)
from token2wav.voice import Voice


@dataclass(eq=False)
class _History:
    """History of one stream: its tokens so far."""

    steps: int
    voice: Voice
    tokens: NDArray[np.int32]  # begins with the tokens of the prompt


class RecomputeFlow(FlowStage[_History]):
    """Flow stage that runs all ODE steps on the whole utterance so far for every chunk.

    Args:
        solvers: solvers of the estimator by ODE steps; the default number comes first.
        full_tail: whether the last chunk is computed under full attention, as in the reference loop
            of some families.
        windows: whether every chunk is computed under full attention over all tokens that have
            arrived: the tokens before the chunk, the chunk, and its look-ahead.
        left_blocks: past blocks that stay visible in addition to the blocks of the prompt; negative
            for all blocks, which is exact.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoder: Encoder,
        noise: FlowNoise,
        solvers: Mapping[int, EulerSolver],
        *,
        full_tail: bool = False,
        windows: bool = False,
        left_blocks: int = -1,
    ) -> None:
        super().__init__()
        self.config, self.left_blocks = config, left_blocks
        self.encoder, self.device = encoder, encoder.device
        self.noise = noise.to(self.device)
        self._full_tail = full_tail
        self._windows = windows
        self._solvers = dict(solvers)
        self._default_steps = next(iter(solvers))

    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        prefix = self.config.grid(len(voice.prompt_tokens)).prefix
        return self.resume(voice, voice.prompt_tokens[:prefix], options.steps)

    def resume(self, voice: Voice, tokens: NDArray[np.int32], steps: int = 0) -> int:
        """Opens a stream in the middle of an utterance.

        Args:
            tokens: all tokens of prompt and utterance before the next chunk.
            steps: ODE steps; 0 for the default.
        """
        return self.register(_History(steps or self._default_steps, voice, tokens))

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        return [self._advance_one(self.state(handle), chunk) for handle, chunk in batch]

    @torch.inference_mode()
    def whole(
        self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0
    ) -> torch.Tensor:
        tokens = np.concatenate((voice.prompt_tokens, tokens))
        chunk = TokenChunk(tokens, start=0, stop=len(tokens), last=True)
        return self._solve(voice, steps or self._default_steps, chunk, full=not streaming)[
            :, len(voice.prompt_mel) :
        ]

    def _advance_one(self, history: _History, chunk: TokenChunk) -> torch.Tensor:
        if len(history.tokens) != chunk.start:
            raise BackendError(
                f"chunk starts at token {chunk.start}, but {len(history.tokens)} were computed"
            )
        tokens = np.concatenate((history.tokens, chunk.tokens))
        if not chunk.provisional:
            history.tokens = tokens[: chunk.stop]
        # With `windows`, the look-ahead is computed too, as if the utterance ended after it.
        stop, last = (len(tokens), True) if self._windows else (chunk.stop, chunk.last)
        whole = TokenChunk(tokens, start=0, stop=stop, last=last)
        full = self._windows or (chunk.last and self._full_tail)
        mel = self._solve(history.voice, history.steps, whole, full=full)
        ratio = self.config.token_mel_ratio
        return mel[:, ratio * chunk.start : ratio * chunk.stop]

    def _solve(self, voice: Voice, steps: int, chunk: TokenChunk, *, full: bool) -> torch.Tensor:
        """Computes the mel (bands, frames) of the tokens of an utterance, from its start."""
        grid = None if full else self.config.grid(len(voice.prompt_tokens), self.left_blocks)
        [mu] = self.encoder.encode([EncoderInput(chunk, grid)])
        frames = mu.shape[1]
        cond = torch.zeros_like(mu)
        prompt = torch.tensor(voice.prompt_mel, device=self.device).T[:, :frames]
        cond[:, : prompt.shape[1]] = prompt
        speaker = self.encoder.speaker(torch.tensor(voice.speaker_embedding, device=self.device))
        allowed = None
        if grid is not None:
            allowed = block_mask(grid.scaled(self.config.token_mel_ratio), frames, self.device)
        noise = self.noise.window(0, frames)
        return self._solvers[steps].solve(
            noise[None], mu[None], speaker[None], cond[None], allowed
        )[0]


@dataclass(eq=False)
class _FrameHistory:
    frames: torch.Tensor  # (channels, n)
    speech_offset: int = 0  # samples already sent


class RecomputeVocoder(VocoderStage[_FrameHistory]):
    """Vocoder stage that vocodes the whole mel so far for every chunk, and returns only the samples
    that were not sent yet.
    """

    def __init__(
        self, network: WaveformNetwork, noise: SourceNoise | None = None, phase: Phase = "exact"
    ) -> None:
        super().__init__()
        self._net, self._noise, self._phase = network, noise, phase

    def open(self, voice: Voice | None = None, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        return self.register(_FrameHistory(self._net.no_frames()))

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, VocoderInput]]) -> list[torch.Tensor]:
        return [self._advance_one(self.state(handle), chunk) for handle, chunk in batch]

    @torch.inference_mode()
    def whole(self, frames: torch.Tensor) -> torch.Tensor:
        return self._net.vocode(frames.to(self._net.device)[None], self._noise, phase=self._phase)[
            0
        ]

    def _advance_one(self, history: _FrameHistory, chunk: VocoderInput) -> torch.Tensor:
        history.frames = torch.cat((history.frames, chunk.frames.to(self._net.device)), dim=1)
        if not chunk.last and history.frames.shape[1] < self._net.first_frames:
            return torch.empty(0, device=self._net.device)
        audio = self.whole(history.frames)
        audio = audio[
            history.speech_offset : len(audio) - (0 if chunk.last else self._net.output_delay)
        ]
        history.speech_offset += len(audio)
        return audio
