"""Pipeline from tokens to audio: it takes the chunks of sessions through flow and vocoder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.errors import EngineError
from token2wav.execution.device import check_device, entered
from token2wav.execution.stages import FlowChunk, FlowEngine, MelChunk, VocoderEngine
from token2wav.model_config import ModelConfig
from token2wav.streaming.hops import HopSchedule
from token2wav.streaming.session import AudioChunk, Session
from token2wav.voice import Voice, check_steps

Timed = Callable[[float, float], None]


class Pipeline:
    """Pipeline of flow and vocoder, through which every chunk of every stream passes.

    Args:
        config: sizes and rates of the model.
        flow: engine that turns tokens into mel.
        vocoder: engine that turns mel into audio.
        schedule: decides the length of chunks.
        steps: numbers of ODE steps that the flow engine was made for; empty for the model's own alone.
        device: device that the engines are on.

    Attributes:
        steps: numbers of ODE steps that streams may have, the usual one first.
    """

    def __init__(
        self,
        config: ModelConfig,
        flow: FlowEngine,
        vocoder: VocoderEngine,
        schedule: HopSchedule,
        steps: tuple[int, ...] = (),
        device: str = "cpu",
    ) -> None:
        self.steps = config.allowed_steps(steps)
        self._config = config
        self.flow = flow
        self.vocoder = vocoder
        self._schedule = schedule
        self._device = torch.device(device)
        self._dropped: deque[Session] = deque()

    def open(self, voice: Voice, steps: int = 0) -> Session:
        """Starts an utterance.

        Args:
            voice: prompt and speaker.
            steps: number of ODE steps, one of `steps`; 0 for the usual number.

        Raises:
            InputError: the voice does not fit the model, or steps are not allowed.
            EngineError: an engine failed.
        """
        voice.check(self._config)
        self.check_steps(steps)
        self._close_dropped()
        with self.running():
            flow_handle = self.flow.open(voice, steps)
            try:
                vocoder_handle = self.vocoder.open()
            except BaseException:
                self.flow.close(flow_handle)
                raise
        return Session(voice, self._config, self._schedule, flow_handle, vocoder_handle)

    def check_steps(self, steps: int) -> None:
        """Raises InputError if an utterance may not have that number of ODE steps; 0 stands for the usual one."""
        check_steps(steps, self.steps)

    def close(self, session: Session) -> None:
        """Frees all that an utterance holds; doing so twice is harmless."""
        session.ended = session.done = True
        self.flow.close(session.flow_handle)
        self.vocoder.close(session.vocoder_handle)

    def drop(self, session: Session) -> None:
        """Lets the next call close an utterance.

        For the garbage collector, which may come in the middle of anything, a lock of an engine held by this very
        thread included: nothing is done here that could wait.
        """
        self._dropped.append(session)

    def _close_dropped(self) -> None:
        while self._dropped:
            self.close(self._dropped.popleft())

    def advance(self, sessions: Sequence[Session], timed: Timed | None = None) -> list[AudioChunk | EngineError]:
        """Runs the next chunk of every session, in one batch. Each must have one (`Session.next_chunk`).

        Several threads may do so at once, for different sessions.

        Args:
            sessions: utterances of the batch.
            timed: takes the seconds that flow and vocoder took.

        Returns:
            For every session its audio, or why it cannot go on: its own numbers are broken, which harms no other.

        Raises:
            EngineError: an engine failed as a whole; none of the sessions can go on.
            DeviceLostError: nor can anything else of this process that needs the GPU.
        """
        self._close_dropped()
        chunks = [(session, chunk) for session in sessions if (chunk := session.next_chunk()) is not None]
        start = time.perf_counter()
        with self.running():
            mels = self.flow.advance([(session.flow_handle, chunk) for session, chunk in chunks])
            between = time.perf_counter()
            new = [
                (session.vocoder_handle, MelChunk(mel[:, self._prompt_frames(session, chunk) :], chunk.last))
                for (session, chunk), mel in zip(chunks, mels, strict=True)
            ]
            audio = _on_host(self.vocoder.advance(new))
        if timed:
            timed(between - start, time.perf_counter() - between)
        return [
            session.sent(chunk, samples)
            if np.isfinite(samples).all()
            else EngineError("engine: the model produced NaN or infinite audio")
            for (session, chunk), samples in zip(chunks, audio, strict=True)
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surrounds every use of the engines: enters their device, and turns what torch raises into `EngineError`."""
        try:
            with entered(self._device):
                yield
        except (RuntimeError, MemoryError) as error:  # torch raises the first for almost everything
            check_device(self._device, error)
            raise EngineError(f"engine: {' '.join(str(error).split())[:300]}") from error

    @property
    def open_streams(self) -> int:
        """Number of utterances that hold memory in either engine."""
        self._close_dropped()
        return max(self.flow.open_streams, self.vocoder.open_streams)

    def _prompt_frames(self, session: Session, chunk: FlowChunk) -> int:
        """Counts the frames at the start of a chunk that belong to the prompt's last, incomplete block."""
        return max(0, session.prompt_tokens - chunk.start) * self._config.flow.token_mel_ratio


def _on_host(audio: list[torch.Tensor]) -> list[NDArray[np.float32]]:
    """Copies audio to the host as arrays. From a GPU in one copy: every copy waits for what runs there."""
    if not audio or audio[0].device.type == "cpu":
        return [samples.numpy() for samples in audio]
    return [samples.numpy() for samples in torch.cat(audio).cpu().split([len(samples) for samples in audio])]
