"""Misdeeds of a soak's clients, each with the answers that a server may give."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from benchmarks.soak.crowd import Misdeed, WrongAnswerError
from benchmarks.soak.lines import Line
from benchmarks.soak.wire import SMALL_WINDOW, Answers, RawStream, Spoil
from token2wav.voice import NO_VOICE
from token2wav_client import Client, ClientVoice, ServerError
from token2wav_client.voice import FIELDS
from token2wav_client.wire import Opening

NOTHING = "left before any answer"
AUDIO = "audio"
_CROWD, _CROWD_TOKENS = (
    16,
    1500,
)  # streams and their tokens; more streams than a soak's server admits


@dataclass(frozen=True)
class Scene:
    """Scene of a misdeed: the server, its models and the lines of the client.

    Attributes:
        lines: lines that the client may send.
        idle_s: seconds after which the server drops an idle stream.
    """

    url: str
    lines: list[Line]
    random: Random
    idle_s: float

    def line(self, at_least: int = 0) -> Line:
        return self.random.choice([line for line in self.lines if len(line.tokens) >= at_least])

    def token(self) -> NDArray[np.int32]:
        """Returns one token, or one frame of codes."""
        return self.line().tokens[:1]

    def opening(self, line: Line, *, keep_open: bool | None = None) -> Opening:
        if keep_open is None:
            keep_open = self.random.random() < 0.5
        return Opening(line.voice, self.random.choice(["float32", "int16"]), keep_open)

    def stream(self, options: tuple[tuple[str, int], ...] = ()) -> RawStream:
        return RawStream(self.url, str(uuid4()), options)

    def moment(self, at_most_s: float = 1.0) -> None:
        time.sleep(self.random.uniform(0.0, at_most_s))


def _answer(answers: Answers) -> str:
    return answers.errors[0] if answers.errors else AUDIO if answers.audio else NOTHING


def cancel_before_audio(scene: Scene) -> str:
    line, keep_open = scene.line(), scene.random.random() < 0.5
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
    line = scene.line(at_least=100)
    with (
        Client(scene.url) as client,
        client.open(line.voice, keep_open=scene.random.random() < 0.5) as utterance,
    ):
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
        scene.moment(0.02)
        utterance.cancel()
    return NOTHING


def killed_process(scene: Scene) -> str:
    line = scene.line(at_least=100)
    with tempfile.TemporaryDirectory(prefix="token2wav-soak-") as temporary:
        folder = Path(temporary)
        out = folder / "out.wav"
        np.save(folder / "tokens.npy", line.tokens)
        command = [
            sys.executable,
            "-m",
            "token2wav",
            "synth",
            "--quiet",
            "--url",
            scene.url,
            "--rate",
            "25",
        ]
        command += ["--tokens", str(folder / "tokens.npy")]
        if line.voice is not None:
            arrays = {name: getattr(line.voice, name) for name in FIELDS}
            save_file(arrays, folder / "voice.safetensors")
            command += ["--voice", str(folder / "voice.safetensors")]
        with subprocess.Popen(
            [*command, "--out", str(out)], stderr=subprocess.PIPE, text=True
        ) as process:
            while process.poll() is None and not out.exists():
                time.sleep(0.05)
            scene.moment()
            process.kill()
            _, message = process.communicate()
        if process.returncode == -9:
            return AUDIO
        return f"exit code {process.returncode}: {message.strip()}"


def dropped_connection(scene: Scene) -> str:
    line = scene.line(at_least=100)
    with scene.stream() as stream:
        stream.send(line.tokens[:60], scene.opening(line))
        scene.moment(0.3)
        stream.send(line.tokens[60:])
        scene.moment(0.3)
    return NOTHING


def dropped_between_requests(scene: Scene) -> str:
    line = scene.line(at_least=100)
    with scene.stream() as stream:
        stream.send(line.tokens[:60], scene.opening(line, keep_open=False))
        return _answer(stream.answers())


def stops_sending(scene: Scene) -> str:
    """Stops sending until the server has dropped the idle stream, then sends again."""
    with scene.stream() as stream:
        line = scene.line()
        stream.send(line.tokens[:1], scene.opening(line, keep_open=False))
        if errors := stream.answers().errors:
            return errors[0]
        time.sleep(scene.idle_s + 5.0)  # the server looks 20 times a second, less often under load
        stream.send(line.tokens[:1])
        return _answer(stream.answers())


def stops_sending_and_is_told(scene: Scene) -> str:
    with scene.stream() as stream:
        line = scene.line()
        stream.send(line.tokens[:1], scene.opening(line, keep_open=True))
        return _answer(stream.answers())


def stops_reading_and_leaves(scene: Scene) -> str:
    return _stop_reading(scene, read_on=False)


def stops_reading_and_reads_on(scene: Scene) -> str:
    return _stop_reading(scene, read_on=True)


def _stop_reading(scene: Scene, *, read_on: bool) -> str:
    line = scene.line(at_least=200)
    answers = Answers()
    with scene.stream(SMALL_WINDOW) as stream:
        stream.send(line.tokens, replace(scene.opening(line), audio_format="float32"), end=True)
        over = stream.read(answers)
        if answers.errors:
            return answers.errors[0]
        time.sleep(2.0)
        while read_on and not over:
            over = stream.read(answers)
    if read_on and (fault := answers.errors or line.fault(answers.audio)):
        raise WrongAnswerError(f"what was read late of '{line.name}' is wrong: {fault}")
    return AUDIO


def crowd_of_long_texts(scene: Scene) -> str:
    """Sends long texts at full speed, as many as the server admits, and leaves after some audio."""
    line, answers = scene.line(at_least=100), Answers()
    tokens = np.tile(
        line.tokens, (_CROWD_TOKENS // len(line.tokens), *[1] * (line.tokens.ndim - 1))
    )
    with ExitStack() as stack:
        streams = [stack.enter_context(scene.stream()) for _ in range(_CROWD)]
        for stream in streams:
            stream.send(tokens, scene.opening(line, keep_open=False), end=True)
        for stream in streams:
            stream.read(answers)
    return AUDIO if answers.audio else answers.errors[0]


def in_the_first_request(spoil: Spoil) -> Callable[[Scene], str]:
    """Returns a misdeed that spoils the request that starts an utterance."""

    def act(scene: Scene) -> str:
        line = scene.line()
        with scene.stream() as stream:
            stream.send(
                line.tokens, scene.opening(line), end=scene.random.random() < 0.5, spoil=spoil
            )
            return _answer(stream.answers())

    return act


def in_the_middle(spoil: Spoil) -> Callable[[Scene], str]:
    """Returns a misdeed that spoils a later request of an utterance.

    The client then abandons the utterance.
    """

    def act(scene: Scene) -> str:
        line = scene.line(at_least=100)
        with scene.stream() as stream:
            stream.send(line.tokens[:60], scene.opening(line, keep_open=False))
            if errors := stream.answers().errors:
                return errors[0]
            stream.send(line.tokens[60:], spoil=spoil)
            return _answer(stream.answers())

    return act


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
    line = scene.line(at_least=100)
    opening = replace(scene.opening(line, keep_open=False), audio_format="float32")
    sequence = str(uuid4())
    with (
        RawStream(scene.url, sequence, stream_key="owner") as owner,
        RawStream(scene.url, sequence) as thief,
    ):
        owner.send(line.tokens[:60], opening)
        first_answers = owner.answers()
        if first_answers.errors:
            return first_answers.errors[0]
        starts = scene.random.random() < 0.5
        thief.send(line.tokens[:1], scene.opening(line) if starts else None)
        thief.send(line.tokens[:1], end=True)
        answers = thief.answers(requests=2)
        owner.send(line.tokens[60:], end=True)
        last_answers = owner.answers()
        if fault := last_answers.errors or line.fault(first_answers.audio + last_answers.audio):
            raise WrongAnswerError(
                f"'{line.name}', whose id another client took, is wrong: {fault}"
            )
        return _answer(answers)


def unknown_sequence(scene: Scene) -> str:
    with scene.stream() as stream:
        stream.send(scene.token(), end=scene.random.random() < 0.5)
        return _answer(stream.answers())


def tensor(name: str, array: NDArray[Any], datatype: str) -> Spoil:
    """Returns a function that replaces an input by an array.

    The array becomes a further input if no input has the name.
    """

    def spoil(message: Any) -> None:
        names = [entry.name for entry in message.inputs]
        if name not in names:
            message.inputs.add(name=name)
            message.raw_input_contents.append(b"")
        index = names.index(name) if name in names else -1
        message.inputs[index].datatype = datatype
        message.inputs[index].shape[:] = array.shape
        message.raw_input_contents[index] = array.tobytes()

    return spoil


def codes(value: int, dtype: type = np.int32, more_codebooks: int = 0) -> Spoil:
    """Returns a function that replaces the tokens by one frame of equal codes.

    Args:
        value: all codes of the frame.
        more_codebooks: codebooks that the frame has besides those of the stream.
    """

    def spoil(message: Any) -> None:
        [shape] = [entry.shape for entry in message.inputs if entry.name == "tokens"]
        frame = np.full((1, shape[1] + more_codebooks), value, dtype)
        tensor("tokens", frame, np.dtype(dtype).name.upper())(message)

    return spoil


def parameter(name: str, value: str) -> Spoil:
    def spoil(message: Any) -> None:
        message.parameters[name].string_param = value

    return spoil


def fewer_bytes(message: Any) -> None:
    message.raw_input_contents[0] = message.raw_input_contents[0][:-3]


def without_embedding(message: Any) -> None:
    [index] = [
        index for index, entry in enumerate(message.inputs) if entry.name == "speaker_embedding"
    ]
    del message.inputs[index], message.raw_input_contents[index]


_NAN = np.full((160, 80), np.nan, np.float32)
_ID = np.zeros(32, np.uint8)

_GARBAGE_FIRST: dict[str, tuple[Spoil, str]] = {
    "fewer bytes than the shape says": (fewer_bytes, "byte size"),
    "unknown audio format": (parameter("audio_format", "mp3"), "audio_format: 'mp3' is not one of"),
}
_TOKENS_FIRST: dict[str, tuple[Spoil, str]] = {
    "token beyond the vocabulary": (
        tensor("tokens", np.array([6561], np.int32), "INT32"),
        "tokens: 6561 at index 0 is outside the vocabulary",
    ),
    "tokens in two dimensions": (
        tensor("tokens", np.zeros((1, 2), np.int32), "INT32"),
        "unexpected shape for input 'tokens'",
    ),
    "tokens as INT64": (tensor("tokens", np.ones(1, np.int64), "INT64"), "data-type is 'INT64'"),
    "tokens as FP32": (tensor("tokens", np.ones(1, np.float32), "FP32"), "data-type is 'FP32'"),
    "mel of the wrong length": (
        tensor("prompt_mel", np.zeros((3, 80), np.float32), "FP32"),
        r"prompt_mel: shape \(3, 80\), expected",
    ),
    "mel of NaN": (
        lambda message: (
            tensor("prompt_mel", _NAN, "FP32")(message),
            tensor("prompt_tokens", np.zeros(80, np.int32), "INT32")(message),
        )[-1],
        "prompt_mel: holds NaN or infinite values",
    ),
    "no speaker embedding": (without_embedding, "speaker_embedding: missing"),
    "voice and voice id": (tensor("voice_id", _ID, "UINT8"), "voice_id: sent together"),
}
_TOKENS_MIDDLE: dict[str, tuple[Spoil, str]] = {
    "negative token in the middle": (
        tensor("tokens", np.array([-5], np.int32), "INT32"),
        "tokens: -5 at index 0 is outside the vocabulary",
    ),
    "INT64 in the middle": (
        tensor("tokens", np.ones(1, np.int64), "INT64"),
        "data-type is 'INT64'",
    ),
    "voice in the middle": (
        tensor("speaker_embedding", np.ones(192, np.float32), "FP32"),
        "speaker_embedding: only the first request of an utterance may have this field",
    ),
}

# Triton compares the shape with the model, unless a stream of the model may send few codebooks.
_WRONG_SHAPE = r"unexpected shape for input 'tokens'"
_CODES_FIRST: dict[str, tuple[Spoil, str]] = {
    "code beyond the codebook": (
        codes(2**20),
        "tokens: 1048576 at index .* is outside the vocabulary",
    ),
    "codes in one dimension": (tensor("tokens", np.zeros(2, np.int32), "INT32"), _WRONG_SHAPE),
    "too many codebooks": (
        codes(0, more_codebooks=1000),
        rf"tokens: shape \(1, 10\d\d\), expected|{_WRONG_SHAPE}",
    ),
    "codes as INT64": (codes(1, np.int64), "data-type is 'INT64'"),
    "voice for a codec": (
        tensor("speaker_embedding", np.ones(192, np.float32), "FP32"),
        f"speaker_embedding: {NO_VOICE}",
    ),
}
_CODES_MIDDLE: dict[str, tuple[Spoil, str]] = {
    "negative code in the middle": (
        codes(-5),
        "tokens: -5 at index .* is outside the vocabulary",
    ),
    "another number of codebooks": (
        codes(0, more_codebooks=1),
        rf"tokens: \d+ codebooks|tokens: shape \(1, \d+\), expected|{_WRONG_SHAPE}",
    ),
}

_MISDEEDS: list[Misdeed[Scene]] = [
    Misdeed("cancel", "before the first audio", cancel_before_audio, NOTHING),
    Misdeed("cancel", "in the middle", cancel_in_the_middle, AUDIO),
    Misdeed("cancel", "at once after the end", cancel_at_once, NOTHING),
    Misdeed("vanish", "process killed", killed_process, AUDIO),
    Misdeed("vanish", "connection dropped", dropped_connection, NOTHING),
    Misdeed("vanish", "connection dropped between requests", dropped_between_requests, AUDIO),
    Misdeed(
        "stall",
        "stops sending and comes back",
        stops_sending,
        r"stream: no tokens for \S+ s, so it was closed",
    ),
    Misdeed(
        "stall",
        "stops sending",
        stops_sending_and_is_told,
        r"stream: no tokens for \S+ s, so it was closed",
    ),
    Misdeed("stall", "stops reading and leaves", stops_reading_and_leaves, AUDIO),
    Misdeed("stall", "stops reading and reads on", stops_reading_and_reads_on, AUDIO),
    Misdeed("crowd", "long texts at full speed", crowd_of_long_texts, AUDIO),
    Misdeed("garbage", "tokens after the end", tokens_after_the_end, "ended"),
    Misdeed("garbage", "id of another", id_of_another, "an open stream of another client"),
    Misdeed("garbage", "unknown sequence", unknown_sequence, "is no open stream"),
]


def misdeeds(*, codec: bool) -> list[Misdeed[Scene]]:
    """Returns all misdeeds against a server of a flow model, or of a codec."""
    first = _GARBAGE_FIRST | (_CODES_FIRST if codec else _TOKENS_FIRST)
    middle = _CODES_MIDDLE if codec else _TOKENS_MIDDLE
    return [
        *_MISDEEDS,
        *(
            Misdeed("garbage", name, in_the_first_request(spoil), expected)
            for name, (spoil, expected) in first.items()
        ),
        *(
            Misdeed("garbage", name, in_the_middle(spoil), expected)
            for name, (spoil, expected) in middle.items()
        ),
    ]
