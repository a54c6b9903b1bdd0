"""Accumulator: the first stage of the ensemble, which cuts the tokens of streams into chunks.

It runs only inside Triton's Python backend.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from token2wav.config import ServerConfig
from token2wav.errors import EngineError, InputError, Token2WavError
from token2wav.families import read_config
from token2wav.serving.audio_output import AudioOutput
from token2wav.serving.chunking import Chunker, HopSchedule, checked_tokens
from token2wav.serving.clocks import Playback
from token2wav.serving.request import ENDED
from token2wav.voice import Voice, check_steps
from token2wav_server.ensemble.ordered_stage import Label, ticker
from token2wav_server.ensemble.stages import FlowContent, held_back_seconds
from token2wav_server.ensemble.wire import ToFlow
from token2wav_server.metrics import open_streams, refusals
from token2wav_server.model_process import check_not_draining
from token2wav_server.sequences import OPEN_TO_OTHERS, Sequences, started_twice
from token2wav_server.triton_reply import TritonReply
from token2wav_server.triton_request import Options, TritonRequest
from token2wav_server.voices import registry

log = logging.getLogger(__name__)

_RESAMPLER_SECONDS = 0.075  # largest duration of audio that a resampler holds back


@dataclass(eq=False)
class _Stream:
    """Stream of one utterance whose last tokens have not arrived yet.

    Attributes:
        chunker: tokens of the stream, and the chunk that is sent next.
        playback: playback clock of the listener.
        voice: prompt and speaker, which are sent with the first chunk.
        client: name of the client; empty if it has none.
        options: parameters of the first request.
        held_back: seconds of audio that the later stages will still hold back from coming chunks.
        stream_id: number that identifies the stream in the later stages. It is random, because a
            later stage may still hold state of an earlier stream after a client has reused its
            sequence id, or after this process was restarted.
        admitted: monotonic time of the first request, in seconds.
        last_progress: monotonic time at which the latest tokens arrived, in seconds.
    """

    chunker: Chunker
    playback: Playback
    voice: Voice
    client: str
    options: Options
    held_back: float
    stream_id: int = field(default_factory=lambda: secrets.randbits(63))
    admitted: float = field(default_factory=time.monotonic)
    last_progress: float = field(default_factory=time.monotonic)

    def label(self, *, last: bool) -> Label:
        """Returns the label of the next chunk."""
        return Label(self.stream_id, self.chunker.chunks, last, self.options.audio_format)


class Accumulator:
    """Accumulator behind the Triton model `token_accumulator`.

    Args:
        folder: model folder.
        server: settings of the server.

    Attributes:
        close: function that stops the thread which drops idle streams.
    """

    def __init__(self, folder: Path, server: ServerConfig) -> None:
        self._config = read_config(folder).with_stream_settings(server.stream)
        self._config.check(server.stream)
        self._limits = server.limits
        self._schedule = HopSchedule.of(server.stream, self._config)
        self._steps = self._config.allowed_steps(server.stream.steps)
        self._held_back = held_back_seconds(self._config, server.stream)
        self._voices = registry(server, self._config)
        self._streams: Sequences[_Stream] = Sequences()
        self._lock = threading.Lock()
        self._open_streams = open_streams("scheduler")
        self._refused = refusals()
        log.info(OPEN_TO_OTHERS)
        self.close = ticker(self._expire, self._limits.idle_seconds)

    def handle(self, request: Any) -> None:
        """Answers one request with the chunks whose tokens are complete now."""
        try:
            with self._lock:
                self._handle(TritonRequest.read(request), ToFlow(request, self._config))
        except Token2WavError as error:
            self._refused(error)
            TritonReply(request).fail(error)
        except Exception as error:
            log.exception("a request failed")
            TritonReply(request).fail(
                EngineError(f"token_accumulator: {type(error).__name__}: {error}")
            )
        self._open_streams(len(self._streams))

    def _handle(self, request: TritonRequest, sender: ToFlow) -> None:
        if request.start:
            check_not_draining()
            stream = self._open(request, request.options())
        else:
            stream = self._streams.find(request.sequence_id, request.owner)
        try:
            if not request.start:
                request.options()
            self._push(stream, request)
            self._send_chunks(stream, sender)
        except BaseException as error:
            self._streams.remove(request.sequence_id, stream, f"stream: it failed: {error}")
            if not isinstance(error, Token2WavError) or not stream.chunker.chunks:
                raise
            self._refused(error)
            sender.send(stream.label(last=True), error)  # later stages hold state of the stream
        if stream.chunker.done:
            self._streams.remove(request.sequence_id, stream, ENDED)
        sender.finish()

    def _open(self, request: TritonRequest, options: Options) -> _Stream:
        sequence_id, owner = request.sequence_id, request.owner
        if (open_stream := self._streams.started_by(sequence_id, owner)) is not None:
            # The later stages drop the stream after their idle time. An error could reach them only
            # in answer to a request that continues the stream.
            self._streams.remove(
                sequence_id, open_stream, f"stream: it failed: {started_twice(sequence_id)}"
            )
            raise started_twice(sequence_id)
        voice = request.voice(options.voice, self._voices, self._config)
        check_steps(options.steps, self._steps)
        AudioOutput(self._config, options.audio_format)  # raises InputError for a bad sample rate
        self._limits.check_room(
            [stream.client for _, stream in self._streams.items()], owner.client
        )
        playback = Playback(buffer_seconds=self._limits.player_buffer_seconds)
        chunker = Chunker(voice.prompt_tokens, self._config, self._schedule, playback)
        resampled = options.audio_format.sample_rate not in (None, self._config.sample_rate)
        held_back = self._held_back + _RESAMPLER_SECONDS * resampled
        stream = _Stream(chunker, playback, voice, owner.client, options, held_back)
        self._streams.add(sequence_id, owner, stream)
        # After the client was admitted, because a new voice may evict the voice of another client.
        self._voices.register(voice)
        return stream

    def _push(self, stream: _Stream, request: TritonRequest) -> None:
        tokens = checked_tokens(request.tokens, self._config)
        if stream.chunker.new_tokens + len(tokens) > self._limits.stream_tokens:
            raise InputError(
                "tokens",
                f"the utterance would exceed {self._limits.stream_tokens} tokens, the limit of "
                f"one stream",
            )
        stream.chunker.push(tokens, end=request.end)
        if len(tokens) or request.end:
            stream.last_progress = time.monotonic()

    def _send_chunks(self, stream: _Stream, sender: ToFlow) -> None:
        chunker = stream.chunker
        while (chunk := chunker.next_chunk) is not None:
            voice = None if chunker.chunks else stream.voice
            sender.send(
                stream.label(last=chunk.last), FlowContent(chunk, voice, stream.options.steps)
            )
            seconds = (
                chunk.stop - chunker.spoken
            ) / self._config.token_frame_rate - stream.held_back
            stream.held_back = max(0.0, -seconds)
            if seconds > 0:
                stream.playback.sent(seconds)  # an estimate: the later stages send it soon
            chunker.computed(heard=seconds > 0)

    def _expire(self) -> None:
        open_seconds = self._limits.open_seconds(self._config.token_frame_rate)
        idle_seconds = self._limits.idle_seconds
        with self._lock:
            now = time.monotonic()
            for sequence_id, stream in self._streams.items():
                if now - stream.last_progress > idle_seconds:
                    self._streams.remove(
                        sequence_id,
                        stream,
                        f"stream: no tokens for {idle_seconds:g} s; it was dropped",
                    )
                elif now - stream.admitted > open_seconds:
                    self._streams.remove(
                        sequence_id,
                        stream,
                        f"stream: open for {open_seconds:g} s, the limit of one; it was dropped",
                    )
            self._open_streams(len(self._streams))
