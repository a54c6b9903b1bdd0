"""Service behind a protocol: passes the tokens of messages to the workers of a model.

The protocol reads a message and makes a reply, for example `token2wav_server.engine` for
Triton. For each message, the service finds the utterance to which it belongs, or opens a new one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable

from token2wav.cache.block_pool import PageNeeds
from token2wav.config import LimitConfig, ServerConfig
from token2wav.errors import InputError, LimitError, Token2WavError, to_public_error
from token2wav.serving.door.message import Message, Options
from token2wav.serving.door.sequences import Sequences
from token2wav.serving.door.voice_registry import VoiceRegistry, voices_in
from token2wav.serving.observer import Observer
from token2wav.serving.pipeline import Pipeline
from token2wav.serving.policy import chunks_at_once
from token2wav.serving.stream import Stream
from token2wav.serving.utterance import Reply, Utterance
from token2wav.serving.worker import WorkerPool, default_workers
from token2wav.stages.cached_flow import page_needs
from token2wav.stages.stage import StageSummary
from token2wav.voice import Voice

log = logging.getLogger(__name__)

# Longest time at start-up in which prompts of voices are computed in advance. The remaining prompts
# are computed for the first utterance of each voice.
_PREFILL_SECONDS = 20.0
_USUAL_SECONDS = 30.0  # assumed duration of an utterance, for the warning about a small cache


class Service:
    """Service of a model, with its workers, its voices and its open utterances.

    When an utterance is over, another one can use its sequence id. Therefore the service identifies
    an utterance by its `Utterance` object. The id only leads from a message to the utterance.

    Args:
        observer: observer of the workers and of refused messages.
        check_admission: function that raises an error if no utterance may start, for example while
            the server drains.
        is_canary: returns whether a client name is that of a test synthesis, which no limit
            refuses and which is served first.
        on_device_lost: called when the device refuses all further work.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        summary: StageSummary,
        config: ServerConfig,
        observer: Observer,
        *,
        check_admission: Callable[[], None] = lambda: None,
        is_canary: Callable[[str], bool] = lambda client: False,
        on_device_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._observer = pipeline.config, observer
        self._check_admission, self._is_canary = check_admission, is_canary
        voices = voices_in(config, self._model)
        self._voices = VoiceRegistry(config.limits.sent_voices, voices)
        _prefill(pipeline, voices.values())
        self._sequences: Sequences[Utterance] = Sequences(config.limits.idle_seconds)
        workers = config.runtime.workers or default_workers(summary.device)
        _warn_of_small_cache(pipeline, config, workers)
        _warn_of_small_backend(summary, config.limits)
        self._workers = WorkerPool(
            pipeline, config.limits, observer, workers=workers, on_device_lost=on_device_lost
        )
        self._utterances = self._workers.utterances
        observer.changed(0)  # counts the prompts of the voices of the settings

    def take(self, read: Callable[[], Message], reply: Reply) -> None:
        """Queues the tokens of one message, and returns before they are computed.

        All audio, and all errors, go to the reply.

        Args:
            read: reads the message. It may raise an error, which refuses the message.
        """
        try:
            self._handle(read(), reply)
        except Exception as error:  # any exception, because further messages have to be handled
            # The public error is assigned to `error`, which Python deletes at the end of this
            # clause. Another variable would not be deleted. The error, its traceback and this frame
            # would then form a reference cycle, which would keep the message and its shared memory
            # alive until Python collects cycles.
            error = to_public_error(error)
            self._observer.refused(error)
            reply.fail(error)

    def drop_abandoned(self) -> None:
        """Ends the utterances whose replies are cancelled, at once. The watch thread of the workers
        does so 20 times a second.
        """
        self._utterances.drop_abandoned()

    def cancel_all(self) -> None:
        """Ends all open utterances as if their clients had cancelled them."""
        self._utterances.cancel_all()

    def close(self) -> None:
        """Ends all utterances. All their replies are over when this method returns."""
        self._workers.close()

    def _handle(self, message: Message, reply: Reply) -> None:
        if message.start:
            self._check_admission()
            options = message.options()
            utterance, keep_open = self._open(message, options), options.keep_open
        else:
            utterance, keep_open = self._continued(message), False
        self._utterances.push(
            utterance, message.tokens, reply, end=message.end, keep_open=keep_open
        )
        if message.end:
            self._sequences.remove(message.sequence_id, utterance, utterance.why_closed)

    def _open(self, message: Message, options: Options) -> Utterance:
        sequence_id, owner = message.sequence_id, message.owner
        open_utterance = self._sequences.started_by(sequence_id, owner)
        # A client that has the final chunk of a stream may use its id again.
        if open_utterance is not None and not open_utterance.leaves:
            error = self._sequences.start_twice(sequence_id, owner)
            self._utterances.cancel(open_utterance, error)
            raise error
        voice = message.voice(options.voice, self._voices, self._model)
        utterance = self._utterances.open(
            voice,
            lambda ended: self._sequences.remove(sequence_id, ended, ended.why_closed),
            client=owner.client,
            canary=self._is_canary(owner.client),
            options=options.utterance,
        )
        try:
            # Again, because a drain may have begun meanwhile. Once it has counted no open
            # utterance, the launcher ends the server.
            self._check_admission()
        except Token2WavError as error:
            self._utterances.cancel(utterance, error)
            raise
        self._sequences.add(sequence_id, owner, utterance)
        # The utterance may have been closed, for example as idle, before it was added.
        if utterance.over:
            self._sequences.remove(sequence_id, utterance, utterance.why_closed)
        # The voice is registered only after the client was admitted, because a new voice may evict
        # the voice of another client.
        self._voices.register(voice)
        return utterance

    def _continued(self, message: Message) -> Utterance:
        utterance = self._sequences.find(message.sequence_id, message.owner)
        utterance.check_open()
        try:
            message.options()
        except InputError as error:
            self._utterances.cancel(utterance, error)
            raise
        return utterance


def limits_line(limits: LimitConfig) -> str:
    """Returns a line about the limits of clients, for the summary that is logged at start-up."""
    return (
        f"limits   {limits.streams} streams, {limits.client_streams} of one client, "
        f"{limits.stream_tokens} tokens in "
        f"each, {limits.sent_voices} voices from clients"
    )


def _prefill(pipeline: Pipeline, voices: Iterable[Voice]) -> None:
    """Computes the prompts of voices in advance, so that the first listeners need not wait. The
    function stops after 20 s, or when the cache is full.
    """
    deadline = time.monotonic() + _PREFILL_SECONDS
    for voice in voices:
        try:
            Stream(pipeline, voice).cancel()
        except LimitError:
            return
        if time.monotonic() > deadline:
            return


def _warn_of_small_cache(pipeline: Pipeline, config: ServerConfig, workers: int) -> None:
    """Logs a warning if the cache has too few pages for the streams that the limits admit."""
    sizes, capacity = pipeline.config, pipeline.usage().capacity
    # One more page is for the last block of the prompt, which is incomplete.
    needs = PageNeeds(math.ceil(_USUAL_SECONDS / sizes.block_seconds) + 1)
    if (window := sizes.window(config.stream)) >= 0:
        needs = page_needs(sizes, window, sizes.hops(config.stream)[1])
    chunks = chunks_at_once(sizes, config.limits.batch_streams, workers)
    streams = needs.streams(capacity, chunks)
    if capacity and streams is not None and streams < config.limits.streams:
        log.warning(
            "the cache has pages for %d streams of %g s, and limits.streams admits %d: if more "
            "streams are open than the cache has pages for, the server refuses new streams, or "
            "recomputes open streams without the cache, which slows all streams; change "
            "limits.streams, stream.left_blocks or runtime.cache_storage",
            *(streams, _USUAL_SECONDS, config.limits.streams),
        )


def _warn_of_small_backend(summary: StageSummary, limits: LimitConfig) -> None:
    """Logs a warning if the backend computes fewer chunks together than the limits admit."""
    most_streams = summary.most_streams
    if most_streams and most_streams < limits.batch_streams:
        log.warning(
            "limits.batch_streams is %d, but the %s backend computes at most %d chunks together, "
            "so larger batches run in parts, one after another; for more than %d streams set "
            "runtime.backend: torch",
            *(limits.batch_streams, summary.name, most_streams, most_streams),
        )
