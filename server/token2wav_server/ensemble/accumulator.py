"""Accumulator, the ensemble's first stage: it cuts the tokens of many utterances into chunks.

Runs inside Triton's Python backend only.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from token2wav.errors import EngineError, InputError, StreamClosedError, Token2WavError
from token2wav.serving.audio_output import AudioOutput
from token2wav.serving.chunking import Chunker, HopSchedule, checked_tokens
from token2wav.serving.clocks import Playback
from token2wav.serving.voices import VoiceRegistry
from token2wav.voice import Voice, check_steps
from token2wav_server.ensemble.ordered_stage import Label, Ticker
from token2wav_server.ensemble.settings import Settings
from token2wav_server.ensemble.stages import FlowContent
from token2wav_server.ensemble.wire import ToFlow
from token2wav_server.metrics import open_streams, refusals
from token2wav_server.protocol import (
    Options,
    Position,
    TritonReply,
    give_back,
    refuse_voice,
    tensor,
    voice_of,
)
from token2wav_server.voices import voices_in

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Stream:
    """Utterance whose tokens still come.

    Attributes:
        stream_id: name under which later stages know it. Random, so that neither a client that uses a sequence id
            again nor a restart of this process meets what an earlier stream left there.
        chunker: its tokens, and the chunk that is handed on next.
        playback: clock of its listener.
        voice: prompt and speaker, which go with the first chunk.
        options: parameters of its first request.
        admitted: time of its admission, in seconds.
        last_progress: time at which tokens came last, in seconds.
    """

    stream_id: int
    chunker: Chunker
    playback: Playback
    voice: Voice
    options: Options
    admitted: float
    last_progress: float

    def label(self, *, last: bool) -> Label:
        """Returns the label of the next chunk."""
        return Label(self.stream_id, self.chunker.chunks, last, self.options.audio_format)


class Accumulator:
    """Accumulator behind the Triton model `token_accumulator`.

    Args:
        settings: model folder and settings of the server.
    """

    def __init__(self, settings: Settings) -> None:
        self._config = settings.model_config()
        self._limits = settings.server.limits
        self._open_seconds = self._limits.open_seconds(self._config.token_frame_rate)
        self._schedule = HopSchedule.of(settings.server.stream, self._config)
        self._steps = self._config.allowed_steps(settings.server.stream.steps)
        self._voices = VoiceRegistry(self._limits.sent_voices)
        for name, voice in voices_in(settings.server, self._config).items():
            self._voices.keep(name, voice)
        self._streams: dict[int | str, _Stream] = {}
        self._lock = threading.Lock()
        self._open_streams = open_streams("scheduler")
        self._refused = refusals()
        self._ticker = Ticker(self._expire, self._limits.idle_seconds)

    def handle(self, request: Any) -> None:
        """Answers one request with the chunks that its tokens made possible."""
        try:
            with self._lock:
                self._handle(request)
        except Token2WavError as error:
            self._refused(error)
            give_back(request)
            TritonReply(request).fail(error)
        except Exception as error:
            log.exception("a request failed")
            TritonReply(request).fail(EngineError(f"token_accumulator: {type(error).__name__}: {error}"))
        self._open_streams(len(self._streams))

    def close(self) -> None:
        """Stops looking for idle streams."""
        self._ticker.stop()

    def _handle(self, request: Any) -> None:
        position = Position.of(request)
        stream = self._open(request, position) if position.start else self._find(position)
        sender = ToFlow(request, self._config)
        try:
            if not position.start:
                refuse_voice(request)
            self._push(stream, tensor(request, "tokens"), end=position.end)
            self._send_chunks(stream, sender)
        except BaseException as error:
            self._streams.pop(position.sequence_id, None)
            if not isinstance(error, Token2WavError) or not stream.chunker.chunks:
                raise
            self._refused(error)
            sender.send(stream.label(last=True), error)  # later stages hold something for it
        if stream.chunker.done:
            self._streams.pop(position.sequence_id, None)
        sender.finish()

    def _open(self, request: Any, position: Position) -> _Stream:
        options = Options.of(request)
        voice = voice_of(request, options.voice, self._voices, self._config)
        check_steps(options.steps, self._steps)
        AudioOutput(self._config, options.audio_format)  # refuses what the vocoder could not send
        if position.sequence_id in self._streams:
            raise InputError(
                "sequence_id", f"'{position.sequence_id}' is in use by an open stream; choose another, at random"
            )
        self._limits.check_room([stream.options.client for stream in self._streams.values()], options.client)
        playback, now = Playback(buffer_seconds=self._limits.player_buffer_seconds), time.monotonic()
        chunker = Chunker(voice.prompt_tokens, self._config, self._schedule, playback)
        stream = _Stream(secrets.randbits(63), chunker, playback, voice, options, now, now)
        if position.sequence_id:
            self._streams[position.sequence_id] = stream
        return stream

    def _find(self, position: Position) -> _Stream:
        try:
            return self._streams[position.sequence_id]
        except KeyError:
            raise StreamClosedError(
                f"sequence_id: '{position.sequence_id}' is no open stream; it ended, failed, was idle for too long, or "
                "its first request had no sequence_start"
            ) from None

    def _push(self, stream: _Stream, tokens: NDArray[Any] | None, *, end: bool) -> None:
        given = np.zeros(0, np.int32) if tokens is None else tokens
        array = checked_tokens(given, self._config)
        if stream.chunker.new_tokens + len(array) > self._limits.stream_tokens:
            raise InputError(
                "tokens", f"the utterance would exceed {self._limits.stream_tokens} tokens, the limit of one stream"
            )
        stream.chunker.push(array, end=end)
        if len(array) or end:
            stream.last_progress = time.monotonic()

    def _send_chunks(self, stream: _Stream, sender: ToFlow) -> None:
        chunker = stream.chunker
        while (chunk := chunker.next_chunk) is not None:
            voice = None if chunker.chunks else stream.voice
            sender.send(stream.label(last=chunk.last), FlowContent(chunk, voice, stream.options.steps))
            seconds = (chunk.stop - chunker.spoken) / self._config.token_frame_rate
            stream.playback.sent(seconds)  # at the other end, soon
            chunker.computed()

    def _expire(self) -> None:
        with self._lock:
            now = time.monotonic()
            for sequence_id, stream in list(self._streams.items()):
                idle, open_for = now - stream.last_progress, now - stream.admitted
                if idle > self._limits.idle_seconds or open_for > self._open_seconds:
                    del self._streams[sequence_id]
            self._open_streams(len(self._streams))
