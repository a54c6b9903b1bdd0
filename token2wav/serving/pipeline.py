"""Pipeline from tokens to audio: it takes the chunks of requests through the stages of a model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.config import PLAYER_BUFFER_SECONDS, StreamConfig
from token2wav.errors import ConfigError, EngineError
from token2wav.execution.device import check_device, entered
from token2wav.execution.stages import CacheUsage, FrameChunk, Stage, TokenChunk
from token2wav.model_config import ModelConfig, StageName
from token2wav.serving.audio_output import AudioChunk, AudioFormat, AudioOutput
from token2wav.serving.chunking import Chunker, HopSchedule
from token2wav.serving.clocks import Load, Playback
from token2wav.serving.request import Request
from token2wav.voice import Voice, check_steps

_Chunk = tuple[Request, tuple[int, ...], TokenChunk]  # a request, its handles, and its next chunk
Timed = Callable[[Mapping[StageName, float]], None]  # takes the seconds of each stage


class Pipeline:
    """Pipeline of the stages of a model, through which every chunk of every request passes.

    Attributes:
        config: configuration of the model.
        stages: stages by their names, in the order in which a chunk passes them.
        steps: numbers of ODE steps that requests may have, the usual one first.
        clock: returns the monotonic seconds by which listeners hear.
        load: of the workers that call it.
    """

    def __init__(
        self,
        config: ModelConfig,
        stages: Mapping[StageName, Stage],
        stream: StreamConfig,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.stages = stages
        self.steps = config.allowed_steps(stream.steps)
        self.clock: Callable[[], float] = time.monotonic
        self._schedule = HopSchedule.of(stream, config)
        self.load = Load()
        self._trim_silence_ms = stream.trim_silence_ms
        self._device = torch.device(device)
        self._dropped: deque[Request] = deque()

    def request(
        self,
        voice: Voice,
        steps: int = 0,
        clock: Callable[[], float] | None = None,
        buffer_seconds: float = PLAYER_BUFFER_SECONDS,
        audio_format: AudioFormat | None = None,
    ) -> Request:
        """Makes a request, which holds nothing of the engines yet.

        Args:
            voice: prompt and speaker, checked against the model.
            steps: number of ODE steps, one of `steps`; 0 for the usual number.
            clock: returns monotonic seconds; None for `Pipeline.clock`.
            buffer_seconds: audio that its listener's player holds before it starts.
            audio_format: of what is sent; None for float32 at the model's rate.

        Raises:
            InputError: steps are not allowed, or the model cannot have that sample rate.
        """
        check_steps(steps, self.steps)
        config, playback = self.config, Playback(clock or self.clock, buffer_seconds)
        chunker = Chunker(voice.prompt_tokens, config, self._schedule, playback, self.load)
        output = AudioOutput(config, audio_format, self._trim_silence_ms)
        return Request(voice, steps or self.steps[0], chunker, playback, output)

    def open(self, request: Request) -> None:
        """Takes what a request needs of the engines, and computes what depends on its voice alone.

        Raises:
            LimitError: the cache has no room for another one.
            EngineError: an engine failed.
        """
        self._close_dropped()
        with self.running(), ExitStack() as opened:
            handles = []
            for stage in self.stages.values():
                handles.append(stage.open(request.voice, request.ode_steps))
                opened.callback(stage.close, handles[-1])
            opened.pop_all()  # every stage has opened it, so that none is closed here
            request.handles = tuple(handles)

    def close(self, request: Request) -> None:
        """Frees all that a request holds; doing so twice is harmless."""
        self.load.remove(request.chunker)
        if request.handles is not None:
            for stage, handle in zip(self.stages.values(), request.handles, strict=True):
                stage.close(handle)
            request.handles = None

    def drop(self, request: Request) -> None:
        """Lets the next call close a request.

        For the garbage collector, which may come in the middle of anything, a lock of an engine
        held by this very
        thread included: nothing is done here that could wait.
        """
        self._dropped.append(request)

    def _close_dropped(self) -> None:
        """Closes requests that were dropped; another thread may be doing the same."""
        while True:
            try:
                dropped = self._dropped.popleft()
            except IndexError:
                return
            self.close(dropped)

    def advance(
        self, requests: Sequence[Request], timed: Timed | None = None
    ) -> list[AudioChunk | EngineError | None]:
        """Runs the next chunk of every request, in one batch. Each must be open and have one.

        Several threads may do so at once, for different requests. `timed` takes the seconds of each
        stage.

        Returns:
            For every request the audio to send, None where nothing of it is to be sent yet, or why
            it cannot go on: its own numbers are broken, which harms no other.

        Raises:
            EngineError: an engine failed as a whole; none of the requests can go on.
            DeviceLostError: nor can anything else of this process that needs the GPU.
        """
        self._close_dropped()
        batch = [
            (request, request.handles, chunk)
            for request in requests
            if request.handles is not None and (chunk := request.chunker.next_chunk) is not None
        ]
        seconds: dict[StageName, float] = {}
        with self.running():
            audio = self._through_stages(batch, seconds)
        # As long as provisional chunks: the first of a stream computes the prompt's last block as
        # well.
        if all(chunk.stop - chunk.start <= 2 * self.config.block_tokens for _, _, chunk in batch):
            self.load.computed(len(batch), sum(seconds.values()))
        if timed:
            timed(seconds)
        return [
            request.output.take(samples, last=chunk.last)
            if np.isfinite(samples).all()
            else EngineError("engine: the model produced NaN or infinite audio")
            for (request, _, chunk), samples in zip(batch, audio, strict=True)
        ]

    def _through_stages(
        self, batch: Sequence[_Chunk], seconds: dict[StageName, float]
    ) -> list[NDArray[np.float32]]:
        """Computes the audio of chunks, and notes the seconds of each stage."""
        chunks = [chunk for _, _, chunk in batch]
        inputs: list[Any] = [*chunks]
        for index, (name, stage) in enumerate(self.stages.items()):
            start = time.perf_counter()
            outputs = stage.advance(
                [
                    (handles[index], given)
                    for (_, handles, _), given in zip(batch, inputs, strict=True)
                ]
            )
            if index == len(self.stages) - 1:
                # a copy from a GPU waits for the stage, so it counts as its time
                audio = _on_host(outputs)
            # frames of the prompt, or of tokens that were spoken already, go no further
            elif index == 0:
                ratio = self.config.token_mel_ratio
                outputs = [
                    frames[:, ratio * chunk.skip :]
                    for chunk, frames in zip(chunks, outputs, strict=True)
                ]
            seconds[name] = time.perf_counter() - start
            inputs = [
                FrameChunk(frames, chunk.last)
                for chunk, frames in zip(chunks, outputs, strict=True)
            ]
        return audio

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surrounds every use of the engines: enters their device, and turns what torch raises into
        `EngineError`.
        """
        try:
            with entered(self._device):
                yield
        except (RuntimeError, MemoryError) as error:  # torch raises the first for almost everything
            check_device(self._device, error)
            raise EngineError(f"engine: {' '.join(str(error).split())[:300]}") from error

    @property
    def open_streams(self) -> int:
        """Number of requests that hold memory in any stage."""
        self._close_dropped()
        return max(stage.open_streams for stage in self.stages.values())

    @property
    def flow(self) -> Any:
        """Stage from tokens to mel; ConfigError for a model without one."""
        return self._stage("flow")

    @property
    def vocoder(self) -> Any:
        """Stage from mel to audio; ConfigError for a model without one."""
        return self._stage("vocoder")

    def usage(self) -> CacheUsage:
        """Returns the use of the cache of keys and values, which only the first stage has."""
        return next(iter(self.stages.values())).usage()

    def _stage(self, name: StageName) -> Stage:
        if name not in self.stages:
            raise ConfigError(
                f"{name}: this model has no such stage; it has {', '.join(self.stages)}"
            )
        return self.stages[name]


def _on_host(audio: list[torch.Tensor]) -> list[NDArray[np.float32]]:
    """Copies audio to the host as arrays.

    From a GPU in one copy: every copy waits for what runs there.
    """
    if not audio or audio[0].device.type == "cpu":
        return [samples.numpy() for samples in audio]
    return [
        samples.numpy()
        for samples in torch.cat(audio).cpu().split([len(samples) for samples in audio])
    ]
