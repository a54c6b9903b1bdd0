"""Door of a server in the process of a test: a service on a model, and what its clients send.

Everything between the protocol and the library is real. The wire, Triton and other processes are
not: those need `testkit/rigs/server_rig.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testkit.patience import until
from testkit.replies import RecordingReply
from testkit.utterances import Audio, joined
from token2wav import AudioChunk, Token2Wav, Voice
from token2wav.config import ServerConfig
from token2wav.errors import Token2WavError
from token2wav.serving.door.message import Message, Parameters
from token2wav.serving.door.sequences import Owner, SequenceId
from token2wav.serving.door.service import Service
from token2wav.serving.observer import Observer
from token2wav.stages.stage import StageSummary
from token2wav.voice import FIELDS

VoiceInputs = dict[str, NDArray[Any]]


class Refusals(Observer):
    """Observer that records the errors of refused messages."""

    def __init__(self) -> None:
        self.errors: list[Token2WavError] = []

    def refused(self, error: Token2WavError) -> None:
        self.errors.append(error)


@dataclass(frozen=True, eq=False)
class Door:
    """A service on a model, with clients that send whole utterances or single messages."""

    model: Token2Wav
    service: Service
    refusals: Refusals
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    @classmethod
    @contextmanager
    def open(
        cls,
        model: Token2Wav,
        config: ServerConfig | None = None,
        summary: StageSummary | None = None,
        **options: Callable[..., Any],
    ) -> Iterator[Door]:
        """Opens a service. After the test, the model may have no open stream."""
        config = config or ServerConfig()
        service = Service(
            model.pipeline, summary or model.summary, config, refusals := Refusals(), **options
        )
        try:
            yield cls(model, service, refusals)
            until(lambda: not model.pipeline.open_streams)
        finally:
            service.close()

    def send(
        self,
        tokens: Any = (),
        voice: Voice | VoiceInputs | str | None = None,
        sequence: SequenceId = 0,
        *,
        start: bool = False,
        end: bool = False,
        parameters: Parameters | None = None,
        reply: RecordingReply | None = None,
    ) -> RecordingReply:
        """Sends one message. Without a sequence id, it is a whole utterance.

        Args:
            voice: the voice, its inputs, or its name.
        """
        parameters = parameters or {}
        if isinstance(voice, str):
            voice, parameters = None, parameters | {"voice": voice}
        elif isinstance(voice, Voice):
            voice = {name: getattr(voice, name) for name in FIELDS}
        message = Message(
            sequence,
            start or not sequence,
            end or not sequence,
            Owner.of(parameters),
            parameters,
            tokens if isinstance(tokens, np.ndarray) else np.array(tokens, np.int32),
            voice or {},
        )
        reply = reply or RecordingReply()
        self.service.take(lambda: message, reply)
        return reply

    def refusal(self, *arguments: Any, **options: Any) -> str:
        """Returns the error of a message that gets no audio."""
        reply = self.send(*arguments, **options)
        error = str(reply.failed())
        assert not reply.chunks
        return error

    def speak(
        self,
        parts: Sequence[NDArray[Any]],
        voice: Voice | VoiceInputs | str | None = None,
        **parameters: Any,
    ) -> Iterator[RecordingReply]:
        """Sends one utterance, a portion of tokens each time that the next reply is asked for."""
        sequence = next(self._ids)
        for index, part in enumerate(parts):
            yield self.send(
                part,
                None if index else voice,
                sequence,
                start=not index,
                end=index == len(parts) - 1,
                parameters=None if index else parameters,
            )

    def heard(
        self,
        parts: Sequence[NDArray[Any]],
        voice: Voice | VoiceInputs | str | None = None,
        **parameters: Any,
    ) -> list[AudioChunk]:
        """Returns the chunks of one utterance that is sent in portions."""
        return chunks_of(list(self.speak(parts, voice, **parameters)))


def chunks_of(replies: Sequence[RecordingReply]) -> list[AudioChunk]:
    """Returns the chunks of an utterance, which its messages share, in order."""
    chunks = [chunk for reply in replies for chunk in reply.succeeded()]
    chunks.sort(key=lambda chunk: chunk.index)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return chunks


def audio_of(replies: Sequence[RecordingReply]) -> Audio:
    return joined(chunks_of(replies))


def at_once(utterances: Sequence[Iterator[RecordingReply]]) -> list[list[RecordingReply]]:
    """Sends utterances side by side: one message of each in turn."""
    replies: list[list[RecordingReply]] = [[] for _ in utterances]
    for turn in itertools.zip_longest(*utterances):
        for sent, reply in zip(replies, turn, strict=True):
            sent += [] if reply is None else [reply]
    return replies


def named(voice_id: str) -> VoiceInputs:
    """Returns the input that gives a voice by its id."""
    return {"voice_id": np.frombuffer(bytes.fromhex(voice_id), np.uint8)}
