"""Pipeline from tokens to audio: computes the chunks of utterances by the stages of a model."""

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
from token2wav.config.model_config import ModelConfig, StageName
from token2wav.errors import BackendError, ConfigError, Token2WavError, one_line
from token2wav.execution.device import check_device, entered
from token2wav.execution.staging import to_host
from token2wav.execution.step_boundary import (
    at_boundaries,
    interruption,
    paced,
    step_boundary,
    wait_for,
)
from token2wav.serving.audio_mark import AudioMark
from token2wav.serving.audio_output import AudioChunk, AudioOutput
from token2wav.serving.chunking import Chunker
from token2wav.serving.clocks import PipelineLoad, Playback
from token2wav.serving.delays import DelayPattern
from token2wav.serving.end_limits import EndLimits
from token2wav.serving.hops import HopSchedule
from token2wav.serving.options import DEFAULTS, UtteranceOptions
from token2wav.serving.tempo import Tempo, exact_speed
from token2wav.serving.utterance import Utterance
from token2wav.stages.stage import CacheUsage, FrameChunk, Stage, StreamOptions, TokenChunk
from token2wav.voice import Voice, check_steps

# An utterance, its handles, and its next chunk.
_Chunk = tuple[Utterance, tuple[int, ...], TokenChunk]
# Result of a chunk: the audio to send; None if the chunk yields no audio yet; or an error.
Result = AudioChunk | Token2WavError | None
Timed = Callable[[Mapping[StageName, float]], None]  # called with the seconds of each stage


class Interruptions:
    """Interruptions of one batch. Call it at every boundary between two ODE steps.

    Args:
        interrupt: takes one turn, if the scheduler finds one, and returns its seconds, else None.
            Its argument is `seconds`. It raises nothing, because an exception would end the batch.

    Attributes:
        seconds: total time of the interruptions.
    """

    def __init__(self, interrupt: Callable[[float], float | None]) -> None:
        self._interrupt = interrupt
        self.seconds = 0.0

    def __call__(self) -> None:
        with interruption():
            while (seconds := self._interrupt(self.seconds)) is not None:
                self.seconds += seconds


class Pipeline:
    """Pipeline of the stages of one model.

    Attributes:
        stages: stages in the order in which they compute a chunk.
        steps: numbers of ODE steps that utterances may have, the default first.
        schedule: schedule of hops, for streams at speed 1.
        mark: plugin that marks the audio of all utterances; None for no mark.
    """

    def __init__(
        self,
        config: ModelConfig,
        stages: Mapping[StageName, Stage[Any]],
        stream: StreamConfig,
        device: str = "cpu",
        mark: AudioMark | None = None,
    ) -> None:
        self.config = config
        self.stages = stages
        self.steps = config.allowed_steps(stream.steps)
        self.mark = mark
        self.clock: Callable[[], float] = time.monotonic
        self._withheld_samples = list(stages.values())[-1].withheld_samples
        self.schedule = HopSchedule.of(stream, config, self._withheld_samples)
        self.load = PipelineLoad()
        self._stream = stream
        self._device = torch.device(device)
        self._dropped: deque[Utterance] = deque()

    def utterance(
        self,
        voice: Voice,
        options: UtteranceOptions = DEFAULTS,
        clock: Callable[[], float] | None = None,
        buffer_seconds: float = PLAYER_BUFFER_SECONDS,
    ) -> Utterance:
        """Creates an utterance, which has no memory in the stages until `open`.

        Args:
            buffer_seconds: audio that the listener's player collects before it starts.

        Raises:
            InputError: an option does not fit the model or the settings.
            BackendError: the plugin of the mark failed.
        """
        config, stream = self.config, self._stream
        check_steps(options.steps, self.steps)
        noise = config.decoder_noise(options.decoder_noise, stream)
        stream_options = StreamOptions(options.steps or self.steps[0], noise)
        config.check_speed(options.speed)
        speed, schedule = exact_speed(options.speed), self.schedule
        if speed != 1:  # the withheld samples then belong to more or fewer tokens
            schedule = HopSchedule.of(stream, config, self._withheld_samples * options.speed)
        limits = EndLimits.of(stream, options.end_after_repeats, options.end_after_silence_s)
        output = AudioOutput(
            config,
            options.audio_format,
            stream.trim_silence_ms,
            limits.silence_s,
            speed,
            self.mark,
        )
        delays = None if options.delays is None else DelayPattern(options.delays, config)
        playback, tokens = Playback(clock or self.clock, buffer_seconds), voice.prompt_tokens
        chunker = Chunker(tokens, config, schedule, playback, self.load, options.speed)
        tempo = None if speed == 1 else Tempo(speed)
        return Utterance(voice, stream_options, chunker, playback, output, delays, tempo, limits)

    def open(self, utterance: Utterance) -> None:
        """Opens an utterance in every stage, which may compute the prompt of its voice. Raises
        LimitError if the cache has no room for another utterance, and BackendError if a backend
        failed.
        """
        self._close_dropped()
        with self.running(), ExitStack() as rollback:
            handles = []
            for stage in self.stages.values():
                handles.append(stage.open(utterance.voice, utterance.stream_options))
                rollback.callback(stage.close, handles[-1])
            rollback.pop_all()
            utterance.handles = tuple(handles)

    def prompt_batches(self, utterance: Utterance) -> int:
        """Returns how many batches `open` would compute now, see `Stage.prompt_batches`."""
        stage = next(iter(self.stages.values()))
        return stage.prompt_batches(utterance.voice, utterance.stream_options)

    def wait(self) -> None:
        wait_for(self._device)

    def close(self, utterance: Utterance) -> None:
        """Frees the memory of an utterance in every stage. A second call does nothing."""
        self.load.remove(utterance.chunker)
        # An unopened utterance has no handles yet, and a closed utterance has none any more.
        for stage, handle in zip(self.stages.values(), utterance.handles, strict=False):
            stage.close(handle)
        utterance.handles = ()
        utterance.output.close()

    def drop(self, utterance: Utterance) -> None:
        """Marks an utterance. The next call of `open`, `advance` or `open_streams` closes it.

        The garbage collector may call this method at any moment, even while the same thread holds a
        lock of a backend. So the method must never wait for a lock.
        """
        self._dropped.append(utterance)

    def _close_dropped(self) -> None:
        while True:
            try:  # another thread may empty the queue meanwhile
                dropped = self._dropped.popleft()
            except IndexError:
                return
            self.close(dropped)

    def advance(
        self,
        utterances: Sequence[Utterance],
        timed: Timed | None = None,
        interruptions: Interruptions | None = None,
    ) -> list[Result]:
        """Computes the next chunk of every utterance, in one batch.

        Several threads may call this method at the same time, for different utterances.

        Args:
            utterances: utterances that are open and have a next chunk.
            interruptions: called between ODE steps, and between stages.

        Returns:
            One entry for each utterance: the audio to send; None if the chunk yields no audio yet;
            or a BackendError if the audio of this utterance is NaN or infinite, or cannot be
            marked. Such an error affects no other utterance.

        Raises:
            BackendError: a backend failed, so no utterance of the batch can continue.
            DeviceLostError: the GPU is lost, so no utterance of this process can continue.
        """
        self._close_dropped()
        batch = [(utterance, utterance.handles, _next_chunk(utterance)) for utterance in utterances]
        seconds: dict[StageName, float] = {}
        handler = paced(interruptions, self._device) if interruptions else None
        with self.running(), at_boundaries(handler):
            audio = self._through_stages(batch, seconds, interruptions)
        if all(chunk.provisional for _, _, chunk in batch):
            self.load.record_batch(len(batch), sum(seconds.values()))
        if timed:
            timed(seconds)
        return [
            utterance.output.result(samples, last=chunk.last)
            for (utterance, _, chunk), samples in zip(batch, audio, strict=True)
        ]

    def _through_stages(
        self,
        batch: Sequence[_Chunk],
        seconds: dict[StageName, float],
        interruptions: Interruptions | None,
    ) -> list[NDArray[np.float32]]:
        def busy_clock() -> float:
            return time.perf_counter() - (interruptions.seconds if interruptions else 0.0)

        chunks = [chunk for _, _, chunk in batch]
        inputs: list[Any] = [*chunks]
        for index, (name, stage) in enumerate(self.stages.items()):
            if index:
                step_boundary()
            start = busy_clock()
            outputs = stage.advance(
                [
                    (handles[index], content)
                    for (_, handles, _), content in zip(batch, inputs, strict=True)
                ]
            )
            if index == len(self.stages) - 1:
                # A copy from a GPU waits for the kernels, so it is part of the stage's time.
                audio = to_host(outputs)
            # `skip` counts tokens of the prompt, and tokens whose audio an earlier provisional
            # chunk has sent. Later stages must not get their frames.
            elif index == 0:
                ratio = self.config.token_mel_ratio
                outputs = [
                    _at_tempo(utterance, frames[:, ratio * chunk.skip :], last=chunk.last)
                    for (utterance, _, chunk), frames in zip(batch, outputs, strict=True)
                ]
            seconds[name] = busy_clock() - start
            inputs = [
                FrameChunk(frames, chunk.last)
                for chunk, frames in zip(chunks, outputs, strict=True)
            ]
        return audio

    @contextmanager
    def running(self) -> Iterator[None]:
        """Prepares this thread for calls of stages (`entered`). Converts errors of torch to
        BackendError, or to DeviceLostError if the GPU is lost.
        """
        try:
            with entered(self._device):
                yield
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError for most errors
            check_device(self._device, error)
            raise BackendError(f"backend: {one_line(error)[:300]}") from error

    @property
    def on_cpu(self) -> bool:
        return self._device.type == "cpu"

    @property
    def open_streams(self) -> int:
        """Utterances that hold memory in any stage."""
        self._close_dropped()
        return max(stage.open_streams for stage in self.stages.values())

    @property
    def flow(self) -> Any:
        """Stage from tokens to mel. A model without this stage raises ConfigError."""
        return self._stage("flow")

    @property
    def vocoder(self) -> Any:
        """Stage from mel to audio. A model without this stage raises ConfigError."""
        return self._stage("vocoder")

    def limit_chunks(self, most: int) -> None:
        """Limits the chunks that the caller computes at the same time, see `Stage.limit_chunks`."""
        next(iter(self.stages.values())).limit_chunks(most)

    def usage(self) -> CacheUsage:
        """Returns the usage of the key-value cache, which only the first stage has."""
        return next(iter(self.stages.values())).usage()

    def _stage(self, name: StageName) -> Stage[Any]:
        if name not in self.stages:
            raise ConfigError(
                f"{name}: this model has no such stage; its stages are {', '.join(self.stages)}"
            )
        return self.stages[name]


def _at_tempo(utterance: Utterance, frames: torch.Tensor, *, last: bool) -> torch.Tensor:
    return utterance.tempo.advance(frames, last=last) if utterance.tempo else frames


def _next_chunk(utterance: Utterance) -> TokenChunk:
    chunk = utterance.chunker.next_chunk
    assert chunk is not None  # the scheduler selects only utterances with a next chunk
    return chunk
