"""Engines that recompute the whole history for every chunk: simple, and the oracle of any other engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.errors import EngineError
from token2wav.execution.handles import HandleTable
from token2wav.execution.stages import CacheUsage, FlowChunk, MelChunk
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.hift import HiFT
from token2wav.networks.masks import BlockMask
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import EulerSolver
from token2wav.networks.source_noise import SourceNoise
from token2wav.voice import Voice


@dataclass(eq=False)
class _History:
    """One utterance so far: the conditions of all its frames, the prompt's included."""

    steps: int  # of the ODE
    kept_blocks: int  # of the prompt, that always stay visible
    mu: torch.Tensor  # (bands, frames)
    prompt_mel: torch.Tensor  # (bands, 2 P)
    speaker: torch.Tensor  # (bands,)


class RecomputeFlowEngine:
    """Runs every chunk as one call of the estimator on the utterance so far.

    Args:
        flow: on the device that is to be used.
        noise: of the flow.
        solvers: of the flow's estimator, by number of ODE steps; the usual number comes first.
        full_tail: whether the last chunk is computed under the full attention mask, as the public loop does.
        left_blocks: blocks of the past that stay visible beside the prompt's; negative for all, which is exact.
    """

    def __init__(
        self,
        flow: Flow,
        noise: FlowNoise,
        solvers: Mapping[int, EulerSolver],
        *,
        full_tail: bool = False,
        left_blocks: int = -1,
    ) -> None:
        self._flow = flow
        self._device = flow.spk_embed_affine_layer.weight.device
        self._noise = noise.to(self._device)
        self._full_tail = full_tail
        self._left_blocks = left_blocks
        self._solvers = dict(solvers)
        self._usual = next(iter(solvers))
        self._streams: HandleTable[_History] = HandleTable()

    @torch.inference_mode()
    def open(self, voice: Voice, steps: int = 0) -> int:
        config = self._flow.config
        prefix = config.prefix_tokens(len(voice.prompt_tokens))
        return self.resume(voice, voice.prompt_tokens[: prefix + config.pre_lookahead_len] if prefix else None, steps)

    @torch.inference_mode()
    def resume(self, voice: Voice, tokens: NDArray[np.int32] | None, steps: int = 0) -> int:
        """Starts in the middle of an utterance.

        Args:
            voice: of the speaker.
            tokens: all tokens before the next chunk, the prompt's first, and the look-ahead after them; None if the
                next chunk is at the very start.
            steps: of the ODE, 0 for the usual number.
        """
        mu = None if tokens is None else self._condition(tokens, left=0, last=False)
        return self._streams.add(self._history(voice, mu, steps))

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
        mu = self._condition(np.concatenate((voice.prompt_tokens, tokens)), left=0, last=True)
        history = self._history(voice, mu, steps)
        return self._solve(history, full=not streaming)[:, history.prompt_mel.shape[1] :]

    def _history(self, voice: Voice, mu: torch.Tensor | None, steps: int) -> _History:
        prompt_mel = torch.tensor(voice.prompt_mel, device=self._device).T
        prefix = self._flow.config.prefix_tokens(len(voice.prompt_tokens)) // self._flow.config.block_tokens
        return _History(
            steps=steps or self._usual,
            kept_blocks=prefix,
            mu=prompt_mel.new_empty(len(prompt_mel), 0) if mu is None else mu,
            prompt_mel=prompt_mel,
            speaker=self._flow.speaker(torch.tensor(voice.speaker_embedding, device=self._device)),
        )

    def _condition(self, tokens: NDArray[np.int32], *, left: int, last: bool) -> torch.Tensor:
        return self._flow.condition(torch.tensor(tokens, device=self._device), left=left, last=last)

    def _advance_one(self, history: _History, chunk: FlowChunk) -> torch.Tensor:
        first_frame = self._flow.config.token_mel_ratio * chunk.start
        if history.mu.shape[1] != first_frame:
            raise EngineError(f"chunk starts at frame {first_frame}, but {history.mu.shape[1]} were computed")
        mu = self._condition(chunk.tokens, left=chunk.left, last=chunk.last)
        history.mu = torch.cat((history.mu, mu), dim=1)
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
            block_mask = BlockMask(self._flow.estimator.block_frames, self._left_blocks, history.kept_blocks)
            mask = block_mask.whole(frames, self._device)
        solver = self._solvers[history.steps]
        return solver.solve(noise[None], history.mu[None], history.speaker[None], cond[None], mask)[0]


@dataclass(eq=False)
class _Mel:
    mel: torch.Tensor  # (bands, frames)
    speech_offset: int = 0  # samples already sent


class _RecomputeVocoder(ABC):
    """Vocodes the whole mel so far for every chunk and cuts off what was sent before.

    Args:
        bands: of the mel.
        device: that is to be used.
        lookahead_frames: at the end of an unfinished mel that yield no audio yet.
    """

    def __init__(self, bands: int, device: torch.device, lookahead_frames: int) -> None:
        self._bands = bands
        self._device = device
        self._lookahead_frames = lookahead_frames
        self._streams: HandleTable[_Mel] = HandleTable()

    @abstractmethod
    def _vocode(self, mel: torch.Tensor, *, final: bool) -> torch.Tensor:
        """Audio (samples,) of a mel (bands, frames), without what is held back unless `final`."""

    def open(self) -> int:
        return self._streams.add(_Mel(torch.empty(self._bands, 0, device=self._device)))

    def advance(self, batch: Sequence[tuple[int, MelChunk]]) -> list[torch.Tensor]:
        return [self._advance_one(self._streams[handle], chunk) for handle, chunk in batch]

    def close(self, handle: int) -> None:
        self._streams.remove(handle)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        """Audio of a whole mel (bands, frames) in one call, (samples,)."""
        return self._vocode(mel.to(self._device), final=True)

    def _advance_one(self, history: _Mel, chunk: MelChunk) -> torch.Tensor:
        history.mel = torch.cat((history.mel, chunk.mel.to(self._device)), dim=1)
        if not chunk.last and history.mel.shape[1] <= self._lookahead_frames:
            return history.mel.new_empty(0)
        audio = self._vocode(history.mel, final=chunk.last)[history.speech_offset :]
        history.speech_offset += len(audio)
        return audio


class RecomputeVocoderEngine(_RecomputeVocoder):
    """HiFT.

    Args:
        hift: on the device that is to be used.
        noise: of the harmonic source.
        phase: rounding of the source's phase, see `frame_sines`.
    """

    def __init__(self, hift: HiFT, noise: SourceNoise, phase: Literal["exact", "reference"] = "exact") -> None:
        super().__init__(hift.config.in_channels, hift.device, hift.lookahead_frames)
        self._hift = hift
        self._noise = noise
        self._phase = phase

    def _vocode(self, mel: torch.Tensor, *, final: bool) -> torch.Tensor:
        return self._hift.vocode(mel[None], self._noise, final=final, phase=self._phase)[0]


class RecomputeBigVGANEngine(_RecomputeVocoder):
    """BigVGAN.

    Args:
        bigvgan: on the device that is to be used.
    """

    def __init__(self, bigvgan: BigVGAN) -> None:
        super().__init__(bigvgan.config.num_mels, bigvgan.device, bigvgan.lookahead_frames)
        self._bigvgan = bigvgan

    @torch.inference_mode()
    def _vocode(self, mel: torch.Tensor, *, final: bool) -> torch.Tensor:
        audio = self._bigvgan(mel[None])[0, 0]
        return audio if final else audio[: -self._bigvgan.delay]
