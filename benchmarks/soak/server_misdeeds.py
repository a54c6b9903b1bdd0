"""Misdeeds of the clients of a server, each with the answers that the server may give.

`tests/served` checks every refusal alone, and a fuzzer sends malformed requests. The garbage here
has to do with streams of others, and with their ends.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from uuid import uuid4

import numpy as np

from benchmarks.soak import crowd
from benchmarks.soak.crowd import AUDIO, NOTHING, WrongAnswerError
from benchmarks.soak.lines import Line
from testkit.rigs.raw_stream import (
    SMALL_WINDOW,
    Answers,
    RawStream,
    fewer_bytes,
)
from token2wav_client import Client, ClientError, ClientVoice, ServerError
from token2wav_client.wire import Opening

KINDS = ("cancel", "vanish", "stall", "crowd", "garbage", "garbage")
IDLE_SECONDS = 12.0  # after which the server drops an idle stream
_LONG_TOKENS, _HALF = 100, 60
_CROWD, _CROWD_TOKENS = 16, 1500  # more streams than the server of a soak admits; tokens of each


@dataclass(frozen=True)
class Scene(crowd.Scene):
    """Scene of a misdeed against a server."""

    url: str

    def opening(self, line: Line, *, keep_open: bool | None = None) -> Opening:
        if keep_open is None:
            keep_open = self.by_chance()
        return Opening(line.voice, self.random.choice(["float32", "int16"]), keep_open)

    def stream(self, options: tuple[tuple[str, int], ...] = ()) -> RawStream:
        return RawStream(self.url, str(uuid4()), options)


Act = crowd.Act[Scene]


def _answer(answers: Answers) -> str:
    return answers.errors[0] if answers.errors else AUDIO if answers.audio else NOTHING


def check_audio(line: Line, answers: Answers, why: str) -> None:
    """Checks the answers to a whole line, which was not spoiled.

    Raises:
        WrongAnswerError: the audio is wrong, up to the error if there is one.
        ClientError: the audio is right, and there is an error.
    """
    if fault := line.fault(answers.audio, cut_short=bool(answers.errors)):
        raise WrongAnswerError(f"'{line.name}', which {why}, is wrong: {fault}")
    if answers.errors:
        raise ClientError(f"'{line.name}', which {why}, failed: {answers.errors[0]}")


# Clients that cancel, or vanish.


def cancel_before_audio(scene: Scene) -> str:
    line, keep_open = scene.line(), scene.by_chance()
    voice = line.voice
    if voice is not None:
        # One more voice, so the server evicts others.
        speaker = voice.speaker_embedding * np.float32(scene.random.uniform(0.5, 2))
        voice = ClientVoice(voice.prompt_tokens, voice.prompt_mel, speaker)
    with Client(scene.url) as client, client.open(voice, keep_open=keep_open) as utterance:
        utterance.push(line.tokens[:1])
        scene.moment()
        utterance.cancel()
    return NOTHING


def cancel_in_the_middle(scene: Scene) -> str:
    line, keep_open = scene.line(_LONG_TOKENS), scene.by_chance()
    with Client(scene.url) as client, client.open(line.voice, keep_open=keep_open) as utterance:
        utterance.push(line.tokens)
        try:
            next(utterance)
        except ServerError as error:
            return str(error)
        utterance.cancel()
    return AUDIO


def cancel_at_once(scene: Scene) -> str:
    line = scene.line()
    with Client(scene.url) as client, client.open(line.voice) as utterance:
        utterance.finish(line.tokens)
        scene.moment(0.0, 0.02)
        utterance.cancel()
    return NOTHING


def dropped_connection(scene: Scene) -> str:
    line = scene.line(_LONG_TOKENS)
    with scene.stream() as stream:
        stream.send(line.tokens[:_HALF], scene.opening(line))
        scene.moment(0.0, 0.3)
        stream.send(line.tokens[_HALF:])
        scene.moment(0.0, 0.3)
    return NOTHING


def first_part(count: int, *, keep_open: bool) -> Act:
    """Returns a misdeed that sends some tokens, hears the answer, and leaves."""

    def act(scene: Scene) -> str:
        line = scene.line(at_least=count)
        with scene.stream() as stream:
            stream.send(line.tokens[:count], scene.opening(line, keep_open=keep_open))
            return _answer(stream.answers())

    return act


# Clients that stop sending or reading, and crowds.


def comes_back_too_late(scene: Scene) -> str:
    line = scene.line(_LONG_TOKENS)
    with scene.stream() as stream:
        stream.send(line.tokens[:_HALF], scene.opening(line, keep_open=False))
        if errors := stream.answers().errors:
            return errors[0]
        time.sleep(IDLE_SECONDS + 5.0)
        stream.send(line.tokens[_HALF:])
        return _answer(stream.answers())


def stops_reading(*, read_on: bool) -> Act:
    """Returns a misdeed that stops reading for a while, and then leaves or reads on."""

    def act(scene: Scene) -> str:
        line, answers = scene.line(at_least=200), Answers()
        with scene.stream(SMALL_WINDOW) as stream:
            stream.send(line.tokens, replace(scene.opening(line), audio_format="float32"), end=True)
            over = stream.read(answers)
            if answers.errors:
                return answers.errors[0]
            time.sleep(2.0)
            while read_on and not over:
                over = stream.read(answers)
        if read_on:
            check_audio(line, answers, "was read late")
        return AUDIO

    return act


def crowd_of_long_texts(scene: Scene) -> str:
    """Sends more long texts at full speed than the server admits, and leaves after some audio."""
    line, answers = scene.line(_LONG_TOKENS), Answers()
    text = np.concatenate([line.tokens] * (_CROWD_TOKENS // len(line.tokens)))
    with ExitStack() as stack:
        streams = [stack.enter_context(scene.stream()) for _ in range(_CROWD)]
        for stream in streams:
            stream.send(text, scene.opening(line, keep_open=False), end=True)
        for stream in streams:
            stream.read(answers)
    return AUDIO if answers.audio else answers.errors[0]


# Clients that send garbage.


def tokens_after_the_end(scene: Scene) -> str:
    line = scene.line()
    with scene.stream() as stream:
        stream.send(line.tokens, scene.opening(line, keep_open=False), end=True)
        stream.send(line.tokens[:1])
        return _answer(stream.answers(requests=2))


def id_of_another(scene: Scene) -> str:
    """Uses the id of an open stream, with or without a first request.

    The owner of the stream must not be harmed.
    """
    line, sequence = scene.line(_LONG_TOKENS), str(uuid4())
    opening = replace(scene.opening(line, keep_open=False), audio_format="float32")
    with (
        RawStream(scene.url, sequence, stream_key="owner") as owner,
        RawStream(scene.url, sequence) as thief,
    ):
        owner.send(line.tokens[:_HALF], opening)
        first_answers = owner.answers()
        if first_answers.errors:
            return first_answers.errors[0]
        thief.send(line.tokens[:1], scene.opening(line) if scene.by_chance() else None)
        thief.send(line.tokens[:1], end=True)
        answers = thief.answers(requests=2)
        owner.send(line.tokens[_HALF:], end=True)
        last_answers = owner.answers()
        last_answers.audio[:0] = first_answers.audio
        check_audio(line, last_answers, "has an id that another took")
        return _answer(answers)


def unknown_sequence(scene: Scene) -> str:
    with scene.stream() as stream:
        stream.send(scene.line().tokens[:1], end=scene.by_chance())
        return _answer(stream.answers())


def fewer_bytes_than_the_shape(scene: Scene) -> str:
    line = scene.line()
    with scene.stream() as stream:
        stream.send(line.tokens, scene.opening(line), end=scene.by_chance(), spoil=fewer_bytes)
        return _answer(stream.answers())


_IDLE = r"stream: no tokens for \S+ s, so it was closed"

MISDEEDS: crowd.Misdeeds[Scene] = {
    "cancel": {
        "before the first audio": (cancel_before_audio, NOTHING),
        "in the middle": (cancel_in_the_middle, AUDIO),
        "at once after the end": (cancel_at_once, NOTHING),
    },
    "vanish": {
        "connection dropped": (dropped_connection, NOTHING),
        "connection dropped between requests": (first_part(_HALF, keep_open=False), AUDIO),
    },
    "stall": {
        # The server looks 20 times a second, less often under load.
        "stops sending and comes back": (comes_back_too_late, _IDLE),
        "stops sending": (first_part(1, keep_open=True), _IDLE),
        "stops reading and leaves": (stops_reading(read_on=False), AUDIO),
        "stops reading and reads on": (stops_reading(read_on=True), AUDIO),
    },
    "crowd": {"long texts at full speed": (crowd_of_long_texts, AUDIO)},
    "garbage": {
        "tokens after the end": (tokens_after_the_end, "ended"),
        "id of another": (id_of_another, "an open stream of another client"),
        "unknown sequence": (unknown_sequence, "is no open stream"),
        "fewer bytes than the shape says": (fewer_bytes_than_the_shape, "byte size"),
    },
}
