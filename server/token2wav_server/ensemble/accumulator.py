"""Accumulator: the first stage of the ensemble, which has the streams and cuts them into chunks.

It is the service of the one-process server, with the same limits, batches and metrics. But its
pipeline computes nothing: it sends chunks to the flow, and waits for the reports of the vocoder.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from token2wav.assembly import withheld_samples
from token2wav.config import PLAYER_BUFFER_SECONDS, ServerConfig, StreamConfig
from token2wav.config.model_config import ModelConfig
from token2wav.errors import ConfigError, InputError, StreamClosedError, to_public_error
from token2wav.published.registry import read_config
from token2wav.serving.door.message import Message
from token2wav.serving.door.service import Service
from token2wav.serving.options import DEFAULTS, UtteranceOptions
from token2wav.serving.pipeline import Interruptions, Pipeline, Result, Timed
from token2wav.serving.utterance import Utterance
from token2wav.stages.stage import (
    DEFAULT_OPTIONS,
    Stage,
    StageSummary,
    StreamOptions,
)
from token2wav.voice import Voice
from token2wav_server.ensemble.links import STAGES, Mailbox, send
from token2wav_server.ensemble.stage_streams import LONGEST_PASSAGE_S, Label
from token2wav_server.ensemble.stages import FlowContent
from token2wav_server.ensemble.wire import ToFlow, no_voice, result_of
from token2wav_server.metrics import ServerMetrics
from token2wav_server.model_process import check_not_draining, is_canary
from token2wav_server.requests import message_of
from token2wav_server.triton_tensors import inputs_of

# Chunks in the later stages at the same time, each with a worker. The stages form batches of them.
# A worker whose batch had several chunks would wait for a lost one before it delivers the others.
_MOST_CHUNKS = 16
_NO_BACKEND = StageSummary("torch", "float32", "cpu")  # this process computes nothing
_NO_LIMITS = "the ensemble cannot end a stream before its client does; use the model token2wav"
_NO_SPEED = "only 1 is possible in the ensemble; use the model token2wav"


class _InFlight(NamedTuple):
    """Chunk in the later stages, or the latest one of its stream.

    Attributes:
        sent: time at which it was sent, on the monotonic clock, which all processes share.
    """

    result: Future[Result]
    sent: float


class LaterStages(Stage[_InFlight]):
    """Flow and vocoder, as the accumulator sees them: it sends chunks, and receives reports.

    Triton drops a chunk between two models if its client has left, and reports nothing. Chunks
    cannot overtake each other by `LONGEST_PASSAGE_S`. So a chunk is lost if a chunk that was sent
    so much later is reported first, or if flow and vocoder were idle for so long one after the
    other.

    The handle of a stream is random, because this process may be restarted while a later stage
    still has an earlier stream.
    """

    def __init__(self, withheld_samples: int) -> None:
        super().__init__()
        self._withheld_samples = withheld_samples
        self._flow_idle_since = 0.0
        self._is_stopped = False

    @property
    def withheld_samples(self) -> int:
        return self._withheld_samples

    def open(self, voice: Voice, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        """Opens a stream. Its first chunk opens it in the stages."""
        handle = secrets.randbits(63)
        self._streams[handle] = _InFlight(Future(), 0.0)
        return handle

    def close(self, handle: int) -> None:
        super().close(handle)
        for stage in STAGES:
            send(stage, [handle])

    def advance(self, batch: Sequence[tuple[int, Utterance]]) -> list[Any]:
        """Sends the next chunk of each utterance, and waits for the audio of the vocoder."""
        results = [self._send(handle, utterance) for handle, utterance in batch]
        return [result.result() for result in results]

    def take(self, report: dict[str, Any]) -> None:
        """Takes the report of a stage. Reports about streams that are over are ignored."""
        if (since := report.get("idle_since")) is not None:
            if report["stage"] == STAGES[0]:
                self._flow_idle_since = since
            elif since >= self._flow_idle_since:
                self._drop_lost(self._flow_idle_since)
        elif (chunk := self._streams.get(report["stream"])) is not None:
            _settle(chunk.result, result_of(report))
            self._drop_lost(chunk.sent - LONGEST_PASSAGE_S)

    def stop(self) -> None:
        """Fails all chunks from now on, so that nobody waits for a report."""
        self._is_stopped = True
        self._drop_lost(math.inf)

    def _drop_lost(self, before: float) -> None:
        for chunk in [*self._streams.values()]:
            if chunk.sent < before:
                _settle(chunk.result, StreamClosedError("stream: its client has left"))

    def _send(self, handle: int, utterance: Utterance) -> Future[Result]:
        result = Future[Result]()
        self._streams[handle] = _InFlight(result, time.monotonic())
        chunk, index = utterance.chunker.next_chunk, utterance.chunker.chunks
        assert chunk is not None  # the scheduler selects only utterances with a next chunk
        error_follows = utterance.last_error is not None
        label = Label(handle, index, chunk.last, utterance.output.audio_format, error_follows)
        content = FlowContent(
            chunk, None if index else utterance.voice, utterance.stream_options.steps
        )
        try:
            reply: Any = utterance.next_reply()
            if self._is_stopped or not reply.forward(label, content):
                raise StreamClosedError(utterance.why_closed)
        except Exception as error:
            _settle(result, to_public_error(error))
        return result


def _settle(result: Future[Result], value: Result) -> None:
    with contextlib.suppress(InvalidStateError):  # another thread was first
        result.set_result(value)


class EnsemblePipeline(Pipeline):
    """Pipeline whose stages are other models of Triton.

    An utterance's replies are `ToFlow`, and its results have no samples, because the vocoder sends
    them to the client.
    """

    def __init__(self, config: ModelConfig, stream: StreamConfig) -> None:
        self.later = LaterStages(withheld_samples(config, stream))
        super().__init__(config, {config.stages[0]: self.later}, stream)

    def utterance(
        self,
        voice: Voice,
        options: UtteranceOptions = DEFAULTS,
        clock: Callable[[], float] | None = None,
        buffer_seconds: float = PLAYER_BUFFER_SECONDS,
    ) -> Utterance:
        """Raises InputError as in `Pipeline`, and for options that the ensemble does not have."""
        if name := _end_limit(options):
            raise InputError(name, _NO_LIMITS)
        if options.speed != 1:
            raise InputError("speed", _NO_SPEED)
        return super().utterance(voice, options, clock, buffer_seconds)

    def advance(
        self,
        utterances: Sequence[Utterance],
        timed: Timed | None = None,
        interruptions: Interruptions | None = None,
    ) -> list[Result]:
        """Computes the next chunk of every utterance. No argument but the first is used."""
        start = time.perf_counter()
        results = self.later.advance(
            [(utterance.handles[0], utterance) for utterance in utterances]
        )
        if all(utterance.chunker.next_provisional for utterance in utterances):
            self.load.record_batch(len(utterances), time.perf_counter() - start)
        return results


class Accumulator:
    """Accumulator behind the Triton model `token_accumulator`."""

    def __init__(self, name: str, folder: Path, server: ServerConfig) -> None:
        config = read_config(folder).with_stream_settings(server.stream)
        config.check(server.stream)
        if limit := _end_limit(server.stream):
            raise ConfigError(f"stream.{limit}: {_NO_LIMITS}")
        pipeline = EnsemblePipeline(config, server.stream)
        self._later = pipeline.later
        self._mailbox = Mailbox(name, self._later.take)
        self._no_voice = no_voice(config)
        self._service = Service(
            pipeline,
            _NO_BACKEND,
            replace(
                server,
                limits=replace(server.limits, batch_streams=1),
                runtime=replace(server.runtime, workers=_MOST_CHUNKS),
            ),
            ServerMetrics(pipeline),
            check_admission=check_not_draining,
            is_canary=is_canary,
        )

        # One batch runs at a time, however many chunks are on their way.
        pipeline.load.workers = 1

    def execute(self, requests: list[Any]) -> None:
        """Queues the tokens of requests. Other threads send their chunks later."""
        for request in requests:
            self._service.take(partial(_message, request), ToFlow(request, self._no_voice))

    def close(self) -> None:
        """Ends all utterances."""
        self._later.stop()
        self._service.close()
        self._mailbox.close()


def _message(request: Any) -> Message:
    """Reads a request. The arrays of the message are views of Triton's memory."""
    return message_of(
        request.correlation_id(), request.flags(), request.parameters(), inputs_of(request)
    )


def _end_limit(source: StreamConfig | UtteranceOptions) -> str:
    """Returns the name of the first limit that would end streams; empty for none."""
    names = ("end_after_repeats", "end_after_silence_s")
    return next((name for name in names if getattr(source, name)), "")
