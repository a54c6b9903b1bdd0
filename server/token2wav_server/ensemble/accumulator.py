"""Accumulator: the first stage of the ensemble, which cuts the tokens of streams into chunks.

This module runs only inside Triton's Python backend.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from token2wav.assembly import withheld_samples
from token2wav.config import ServerConfig, StreamConfig
from token2wav.errors import ConfigError, InputError, Token2WavError, to_public_error
from token2wav.families.registry import read_config
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.clocks import Playback
from token2wav.serving.delivery import deliver, finish
from token2wav.serving.door.message import Message, Options
from token2wav.serving.door.sequences import Sequences
from token2wav.serving.door.voice_registry import registry
from token2wav.serving.hops import HopSchedule
from token2wav.serving.options import UtteranceOptions
from token2wav.serving.request import Request
from token2wav.serving.scheduler import Scheduler
from token2wav.stages.stage import TokenChunk
from token2wav_server.ensemble.ordered_stage import Label, ticker
from token2wav_server.ensemble.stages import FlowContent
from token2wav_server.ensemble.wire import ToFlow
from token2wav_server.metrics import open_streams, refusals, starts
from token2wav_server.model_process import check_not_draining
from token2wav_server.triton_reply import TritonReply
from token2wav_server.triton_request import read_message

log = logging.getLogger(__name__)

_NO_LIMITS = "the ensemble cannot end a stream before its client does; use the model token2wav"
_NO_SPEED = "only 1 is possible in the ensemble; use the model token2wav"
_RESAMPLER_SECONDS = 0.075  # largest duration of audio that a resampler holds back


@dataclass(frozen=True, eq=False)
class _FlowInput:
    """Result of the accumulator for a chunk: the input of the flow, and an estimate of its audio.

    Attributes:
        duration_s: estimated seconds of audio that the later stages send for this chunk.
        sound_s: None, because the accumulator does not know where the first sound is.
    """

    content: FlowContent
    duration_s: float
    sound_s: None = None


@dataclass(eq=False)
class _TokenStream:
    """Stream of one utterance, which is open until its last tokens have arrived.

    Attributes:
        audio_format: encoding and sample rate of the audio that the client receives.
        token_rate: tokens per second of audio.
        held_back: seconds of audio of the next chunks that the later stages will still hold back.
        stream_id: number that identifies the stream in the later stages. It is random, because a
            client may reuse a sequence id, and this process may be restarted, while a later stage
            still has the state of an earlier stream.
    """

    request: Request
    audio_format: AudioFormat
    token_rate: float
    held_back: float
    stream_id: int = field(default_factory=lambda: secrets.randbits(63))

    def label(self, *, last: bool) -> Label:
        """Returns the label of the next chunk."""
        request = self.request
        return Label(
            self.stream_id, request.chunker.chunks, last, self.audio_format, request.admitted
        )

    def flow_input(self, chunk: TokenChunk) -> _FlowInput:
        """Returns the result for a chunk, and updates `held_back`.

        Audio of the first chunks is counted as held back until `held_back` is used up.
        """
        request, chunker = self.request, self.request.chunker
        voice = None if chunker.chunks else request.voice
        new_tokens = max(0, chunk.stop - chunker.spoken)
        seconds = new_tokens / self.token_rate - self.held_back
        self.held_back = max(0.0, -seconds)
        return _FlowInput(FlowContent(chunk, voice, request.ode_steps), max(0.0, seconds))


class Accumulator:
    """Accumulator behind the Triton model `token_accumulator`.

    Attributes:
        close: function that stops the thread which drops idle streams.
    """

    def __init__(self, folder: Path, server: ServerConfig) -> None:
        self._config = read_config(folder).with_stream_settings(server.stream)
        self._config.check(server.stream)
        if name := _end_limit(server.stream):
            raise ConfigError(f"stream.{name}: {_NO_LIMITS}")
        self._limits, self._stream = server.limits, server.stream
        samples = withheld_samples(self._config, server.stream)
        self._schedule = HopSchedule.of(server.stream, self._config, samples)
        # Audio that the vocoder may not have sent yet: also silence that it may trim.
        self._held_back = samples / self._config.sample_rate + server.stream.trim_silence_ms / 1000
        self._voices = registry(server, self._config)
        self._streams: Sequences[_TokenStream] = Sequences(server.limits.idle_seconds)
        self._scheduler = Scheduler(server.limits, self._config, time.monotonic)
        self._lock = threading.Lock()
        self._open_streams = open_streams("scheduler")
        self._refused, self._started = refusals(), starts()
        self.close = ticker(self._expire, self._limits.idle_seconds)

    def handle(self, request: Any) -> None:
        """Answers one request with the chunks whose tokens are complete now."""
        reply = TritonReply(request)
        try:
            with self._lock:
                self._handle(read_message(request), reply, ToFlow(request, self._config))
        except Exception as error:
            # `error` is reused instead of a second variable. `Service.take` gives the reason.
            error = to_public_error(error)
            self._refused(error)
            reply.fail(error)
        self._open_streams(len(self._scheduler.requests))

    def _handle(self, message: Message, reply: TritonReply, sender: ToFlow) -> None:
        if message.start:
            check_not_draining()
            stream = self._open(message, message.options())
        else:
            stream = self._streams.find(message.sequence_id, message.owner)
        try:
            if not message.start:
                message.options()
            self._push(stream, message, reply, sender)
        except Exception as error:
            error = to_public_error(error)
            self._fail(stream.request, error)
            if not stream.request.chunker.chunks:
                raise error from None
            self._refused(error)
            sender.send(stream.label(last=True), error)  # later stages hold state of the stream
            reply.finish()

    def _open(self, message: Message, options: Options) -> _TokenStream:
        sequence_id, owner = message.sequence_id, message.owner
        if (open_stream := self._streams.started_by(sequence_id, owner)) is not None:
            # The later stages keep the stream until its idle time has passed. An error could reach
            # them only in the answer to a request that continues the stream.
            error = self._streams.start_twice(sequence_id, owner)
            self._fail(open_stream.request, error)
            raise error
        if name := _end_limit(options.utterance):
            raise InputError(name, _NO_LIMITS)
        if options.utterance.speed != 1:
            raise InputError("speed", _NO_SPEED)
        voice = message.voice(options.voice, self._voices, self._config)
        playback = Playback(buffer_seconds=self._limits.player_buffer_seconds)
        request = Request.of(
            voice, options.utterance, self._config, self._stream, self._schedule, playback
        )
        request.client = owner.client
        self._scheduler.admit(request)
        self._scheduler.release(request)  # it need not be opened, as this process has no stage
        audio_format = options.utterance.audio_format
        is_resampled = audio_format.sample_rate not in (None, self._config.sample_rate)
        stream = _TokenStream(
            request,
            audio_format,
            self._config.token_frame_rate,
            self._held_back + _RESAMPLER_SECONDS * is_resampled,
        )
        request.on_close = lambda _: self._streams.remove(sequence_id, stream, request.why_closed)
        self._streams.add(sequence_id, owner, stream)
        # The voice is registered only after the client was admitted, because a new voice may evict
        # the voice of another client.
        self._voices.register(voice)
        return stream

    def _push(
        self, stream: _TokenStream, message: Message, reply: TritonReply, sender: ToFlow
    ) -> None:
        """Takes the tokens of a message, and sends the chunks that they complete to the flow."""
        request = stream.request
        tokens = request.checked_tokens(message.tokens, self._config)
        consumed = self._scheduler.push(request, tokens, reply, end=message.end, keep_open=False)

        def send(result: _FlowInput, _: float) -> None:
            sender.send(stream.label(last=result.content.chunk.last), result.content)

        request.start(threading.get_ident())
        while (chunk := request.chunker.next_chunk) is not None:
            if not request.chunker.chunks:
                self._started(chunk.provisional)
            deliver(request, stream.flow_input(chunk), send)
        consumed += self._scheduler.finish_consumed_messages(request)
        self._scheduler.release(request)
        if request.over:
            request.on_close(request)
        finish(consumed)

    def _fail(self, request: Request, error: Token2WavError) -> None:
        self._scheduler.fail(request, error)
        request.on_close(request)

    def _expire(self) -> None:
        with self._lock:
            for request, error in self._scheduler.overdue():
                self._fail(request, error)
            self._open_streams(len(self._scheduler.requests))


def _end_limit(source: StreamConfig | UtteranceOptions) -> str:
    """Returns the name of the first limit that would end streams; empty for none."""
    names = ("end_after_repeats", "end_after_silence_s")
    return next((name for name in names if getattr(source, name)), "")
