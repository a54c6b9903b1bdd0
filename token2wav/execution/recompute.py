"""Stages that recompute the whole history for every chunk: simple, and the oracle of any other stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.errors import EngineError
from token2wav.execution.stages import CacheUsage, Encoder, FlowChunk, HandleTable, MelChunk, Solver
from token2wav.execution.vocoder import VocoderNetwork
from token2wav.model_config import ModelConfig
from token2wav.networks.masks import BlockMask
from token2wav.networks.noise import FlowNoise
from token2wav.voice import Voice


@dataclass(eq=False)
class _History:
    """One utterance so far: the conditions of all its frames, the prompt's included."""

    steps: int  # of the ODE
    kept_blocks: int  # of the prompt, that always stay visible
    encoder_state: Any
    mu: torch.Tensor  # (bands, frames)
    prompt_mel: torch.Tensor  # (bands, 2 P)
    speaker: torch.Tensor  # (bands,)


class RecomputeFlow:
    """Runs every chunk as one call of the estimator on the utterance so far.

    Args:
        config: of the model.
        encoder: of the flow, on the device that is to be used.
        noise: of the flow.
        solvers: of the flow's estimator, by number of ODE steps; the usual number comes first.
        full_tail: whether the last chunk is computed under the full attention mask, as the public loop does.
        left_blocks: blocks of the past that stay visible beside the prompt's; negative for all, which is exact.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoder: Encoder,
        noise: FlowNoise,
        solvers: Mapping[int, Solver],
        *,
        full_tail: bool = False,
        left_blocks: int = -1,
    ) -> None:
        self._config = config
        self._encoder = encoder
        self._device = encoder.device
        self._noise = noise.to(self._device)
        self._full_tail = full_tail
        self._left_blocks = left_blocks
        self._solvers = dict(solvers)
        self._usual = next(iter(solvers))
        self._streams: HandleTable[_History] = HandleTable()

    @torch.inference_mode()
    def open(self, voice: Voice, steps: int = 0) -> int:
        config = self._config
        prefix = config.prefix_tokens(len(voice.prompt_tokens))
        return self.resume(voice, voice.prompt_tokens[: prefix + config.lookahead_tokens] if prefix else None, steps)

    @torch.inference_mode()
    def resume(self, voice: Voice, tokens: NDArray[np.int32] | None, steps: int = 0) -> int:
        """Starts in the middle of an utterance.

        Args:
            voice: of the speaker.
            tokens: all tokens before the next chunk, the prompt's first, and the look-ahead after them; None if the
                next chunk is at the very start.
            steps: of the ODE, 0 for the usual number.
        """
        history = self._history(voice, steps)
        if tokens is not None:
            stop = len(tokens) - self._config.lookahead_tokens
            self._extend(history, FlowChunk(tokens, left=0, start=0, stop=stop, last=False))
        return self._streams.add(history)

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, FlowChunk]]) -> list[torch.Tensor]:
        return [self._advance_one(self._streams[handle], chunk) for handle, chunk in batch]

    def close(self, handle: int) -> None:
        self._streams.remove(handle)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def usage(self) -> CacheUsage:
        return CacheUsage()

    @torch.inference_mode()
    def whole(self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0) -> torch.Tensor:
        """Mel of a whole utterance in one call, (bands, 2 * tokens): under the streaming mask or the full one."""
        history, tokens = self._history(voice, steps), np.concatenate((voice.prompt_tokens, tokens))
        self._extend(history, FlowChunk(tokens, left=0, start=0, stop=len(tokens), last=True))
        return self._solve(history, full=not streaming)[:, history.prompt_mel.shape[1] :]

    def _history(self, voice: Voice, steps: int) -> _History:
        prompt_mel = torch.tensor(voice.prompt_mel, device=self._device).T
        prefix = self._config.prefix_tokens(len(voice.prompt_tokens)) // self._config.block_tokens
        return _History(
            steps=steps or self._usual,
            kept_blocks=prefix,
            encoder_state=self._encoder.start(),
            mu=prompt_mel.new_empty(len(prompt_mel), 0),
            prompt_mel=prompt_mel,
            speaker=self._encoder.speaker(torch.tensor(voice.speaker_embedding, device=self._device)),
        )

    def _extend(self, history: _History, chunk: FlowChunk) -> None:
        [mu] = self._encoder.encode([(history.encoder_state, chunk)])
        history.mu = torch.cat((history.mu, mu), dim=1)

    def _advance_one(self, history: _History, chunk: FlowChunk) -> torch.Tensor:
        first_frame = self._config.token_mel_ratio * chunk.start
        if history.mu.shape[1] != first_frame:
            raise EngineError(f"chunk starts at frame {first_frame}, but {history.mu.shape[1]} were computed")
        self._extend(history, chunk)
        return self._solve(history, full=chunk.last and self._full_tail)[:, first_frame:]

    def _solve(self, history: _History, *, full: bool) -> torch.Tensor:
        """(bands, frames) of the whole history."""
        frames = history.mu.shape[1]
        cond = torch.zeros_like(history.mu)
        prompt = history.prompt_mel[:, :frames]
        cond[:, : prompt.shape[1]] = prompt
        noise = self._noise.window(0, frames)
        mask = None
        if not full:
            block_mask = BlockMask(
                self._config.block_tokens * self._config.token_mel_ratio, self._left_blocks, history.kept_blocks
            )
            mask = block_mask.whole(frames, self._device)
        solver = self._solvers[history.steps]
        return solver.solve(noise[None], history.mu[None], history.speaker[None], cond[None], mask)[0]


@dataclass(eq=False)
class _Mel:
    mel: torch.Tensor  # (bands, frames)
    speech_offset: int = 0  # samples already sent


class RecomputeVocoder:
    """Vocodes the whole mel so far for every chunk and cuts off what was sent before.

    Args:
        network: on the device that is to be used.
        vocode: makes audio (samples,) of a mel (bands, frames) that starts with its utterance.
    """

    def __init__(self, network: VocoderNetwork, vocode: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._net, self._vocode = network, vocode
        self._streams: HandleTable[_Mel] = HandleTable()

    def open(self) -> int:
        return self._streams.add(_Mel(torch.empty(self._net.bands, 0, device=self._net.device)))

    @torch.inference_mode()
    def advance(self, batch: Sequence[tuple[int, MelChunk]]) -> list[torch.Tensor]:
        return [self._advance_one(self._streams[handle], chunk) for handle, chunk in batch]

    def close(self, handle: int) -> None:
        self._streams.remove(handle)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    @torch.inference_mode()
    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        """Audio of a whole mel (bands, frames) in one call, (samples,)."""
        return self._vocode(mel.to(self._net.device))

    def _advance_one(self, history: _Mel, chunk: MelChunk) -> torch.Tensor:
        history.mel = torch.cat((history.mel, chunk.mel.to(self._net.device)), dim=1)
        if not chunk.last and history.mel.shape[1] <= self._net.lookahead_frames:
            return history.mel.new_empty(0)
        audio = self._vocode(history.mel)
        audio = audio[history.speech_offset : len(audio) - (0 if chunk.last else self._net.delay)]
        history.speech_offset += len(audio)
        return audio
