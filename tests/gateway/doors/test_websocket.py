"""WebSocket of the gateway: text in pieces, audio per sentence, and cancellation."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import VOICE, GatewayRig, tokens_of
from testkit.rigs.gateway_socket import CONFIG, Socket, address, opened
from testkit.rigs.gateway_speech import assert_same, expected
from token2wav import Token2Wav
from token2wav_client import ClientVoice

TEXT = "One two three. Four five! Six seven eight nine"
SENTENCES = ["One two three.", "Four five!", "Six seven eight nine"]
SETTINGS = {"limits": {"idle_s": 2.0}}
SLOW = "slow " * 790  # nearly the longest input


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("events", ["binary", "json"])
def test_text_in_pieces_becomes_the_audio_of_its_sentences(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice, size: int, events: str
) -> None:
    with opened(gateway, events=events) as socket:
        for at in range(0, len(TEXT), size):
            socket.send(type="input.text", text=TEXT[at : at + size])
        socket.send(type="input.done")
        assert socket.until("session.done")["total_sentences"] == 3
    assert [event["sentence_text"] for event in socket.of("audio.start")] == SENTENCES
    assert not socket.of("error")
    deltas = [base64.b64decode(event["audio"]) for event in socket.of("audio.delta")]
    assert bool(deltas) == (events == "json")
    assert len(socket.of("audio.progress")) == len(socket.audio + deltas)
    whole = np.concatenate([expected(model, voice, sentence) for sentence in SENTENCES])
    assert_same(b"".join(socket.audio + deltas), whole)
    for index, sentence in enumerate(SENTENCES):
        progress = [
            (event["samples"], event["tokens"])
            for event in socket.of("audio.progress")
            if event["sentence_index"] == index
        ]
        assert progress == sorted(progress)
        assert progress[-1] == (960 * len(tokens_of(sentence)), len(tokens_of(sentence)))


def speak_twice(gateway: GatewayRig, texts: list[str], **config: Any) -> list[dict[str, Any]]:
    """Speaks utterances over one connection, as vLLM-Omni's page of its speech API describes it.

    Returns:
        For each sentence, its `audio.start`, its binary messages as `frames`, and its `audio.done`
        as `done`.
    """
    sentences: list[dict[str, Any]] = []
    with connect(address(gateway), open_timeout=PATIENCE_SECONDS, close_timeout=1) as connection:
        connection.send(json.dumps({"type": "session.config", "voice": VOICE, **config}))
        for utterance, text in enumerate(texts):
            count = len(sentences)
            connection.send(json.dumps({"type": "input.text", "text": text}))
            connection.send(json.dumps({"type": "input.done"}))
            while True:
                message = connection.recv(timeout=PATIENCE_SECONDS)
                if isinstance(message, bytes):
                    sentences[-1]["frames"].append(message)
                    continue
                event = json.loads(message)
                if event["type"] == "audio.start":
                    sentences.append({**event, "frames": []})
                elif event["type"] == "audio.done":
                    sentences[-1]["done"] = event
                elif event["type"] == "session.done":
                    break
            assert event["utterance_index"] == utterance
            assert event["total_sentences"] == len(sentences) - count
        connection.send(json.dumps({"type": "session.close"}))
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=PATIENCE_SECONDS)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1000
    return sentences


def test_two_utterances_of_vllm_omni_over_one_connection(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    """By default each sentence is one message with a whole file."""
    sentences = speak_twice(gateway, ["One two three. Four five!", "Six seven."])
    places = [(sentence["utterance_index"], sentence["sentence_index"]) for sentence in sentences]
    assert places == [(0, 0), (0, 1), (1, 0)]
    for sentence in sentences:
        [file] = sentence["frames"]
        done = sentence["done"]
        assert (sentence["format"], done["total_bytes"], done["error"]) == ("wav", len(file), False)
        text = sentence["sentence_text"]
        with wave.open(io.BytesIO(file)) as wav:
            assert wav.getframerate() == sentence["sample_rate"]
            assert_same(wav.readframes(wav.getnframes()), expected(model, voice, text))
        assert done["usage"]["output_tokens"] == len(tokens_of(text))
        assert done["usage"]["input_tokens"] == len(text)


def test_streamed_audio_of_an_utterance_that_is_not_split(gateway: GatewayRig) -> None:
    """The configuration stays for the second utterance."""
    texts = ["One two three. " * 9 + "Four!", "Five six seven eight nine ten. " * 5 + "End."]
    sentences = speak_twice(
        gateway,
        texts,
        stream_audio=True,
        response_format="pcm",
        split_granularity="none",
        task_type="CustomVoice",
        language="Auto",
        speed=2,
    )
    assert [sentence["sentence_text"] for sentence in sentences] == texts
    for sentence, text in zip(sentences, texts, strict=True):
        assert len(sentence["frames"]) > 1
        samples = 480 * len(tokens_of(text))
        assert sentence["done"]["total_bytes"] == 2 * samples
        assert sum(map(len, sentence["frames"])) == 2 * samples


def test_a_configuration_is_refused_while_text_is_buffered(gateway: GatewayRig) -> None:
    with opened(gateway) as socket:
        socket.send(type="session.config", voice=VOICE, stream_audio=True, response_format="wav")
        socket.send(type="input.text", text="One two")
        socket.send(**CONFIG | {"response_format": "flac"})
        assert_error(socket, "session.config: an utterance has begun")
        socket.send(type="input.text", text=" three.")
        socket.send(type="input.done")
        # It is accepted after the end of the utterance, which may still be spoken.
        socket.send(**CONFIG | {"response_format": "flac", "split_granularity": "clause"})
        socket.send(type="input.text", text="Four five six, seven.")
        socket.send(type="input.done")
        for _ in range(2):
            socket.until("session.done")
    starts = [(event["sentence_text"], event["format"]) for event in socket.of("audio.start")]
    assert starts == [("One two three.", "wav"), ("Four five six,", "flac"), ("seven.", "flac")]


def test_an_empty_utterance_and_the_end_of_the_session(gateway: GatewayRig) -> None:
    with opened(gateway) as socket:
        socket.send(type="input.done")
        assert socket.until("session.done")["total_sentences"] == 0
        socket.send(type="input.text", text="One two. Never spoken")
        socket.send(type="session.close")  # after the sentences that are complete
        with pytest.raises(ConnectionClosed):
            socket.until("never")
    assert [event["sentence_text"] for event in socket.of("audio.start")] == ["One two."]
    assert len(socket.of("audio.done")) == 1


def test_cancel_drops_the_text_that_waits(gateway: GatewayRig) -> None:
    with opened(gateway) as socket:
        socket.send(type="cancel")  # nothing is spoken yet
        assert socket.until("audio.cancelled")["sentence_index"] is None
        socket.send(type="input.text", text=f"{SLOW}. Never spoken. Nor this")
        socket.until("audio.progress")
        socket.send(type="cancel")
        assert socket.until("audio.cancelled")["sentence_index"] == 0
        socket.send(type="input.text", text="Four five!")
        socket.send(type="input.done")
        done = socket.until("session.done")
        assert (done["utterance_index"], done["total_sentences"]) == (1, 1)
    assert [event["sentence_text"] for event in socket.of("audio.start")][1:] == ["Four five!"]


def test_a_sentence_that_fails_does_not_end_the_session(gateway: GatewayRig) -> None:
    with opened(gateway, response_format="opus") as socket:
        socket.send(type="input.text", text="nothing\nOne two.")
        socket.send(type="input.done")
        assert socket.until("session.done")["total_sentences"] == 2
    (error,) = socket.of("error")
    assert "0 words" in error["error"]["message"]
    assert error["sentence_index"] == 0
    assert socket.audio[0][:4] == b"OggS"
    assert [event["error"] for event in socket.of("audio.done")] == [True, False]
    assert error["message"] == error["error"]["message"]


def assert_refused(socket: Socket, reason: str) -> None:
    """Asserts that the session ends with an error that is the client's fault."""
    assert_error(socket, reason)
    with pytest.raises(ConnectionClosed) as closed:
        socket.until("never")
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008


def assert_error(socket: Socket, reason: str) -> None:
    """Asserts that the next error is the client's fault, and names the reason."""
    error = socket.until("error")["error"]
    assert reason in error["message"]
    assert error["param"] in (
        None,
        "body",
        "type",
        "text",
        "voice",
        "model",
        "response_format",
        "speed",
        "language",
        "split_granularity",
        "ref_audio",
        "speaker_embedding",
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("{", "expected a JSON object"),
        ('{"type": "input.txt", "text": ""}', "Input should be"),
        ('{"type": "input.text"}', "input.text needs the field text"),
        ('{"type": "cancel", "text": "It rains."}', "other messages have none"),
        ("[" * 100_000, "expected a JSON object"),
        ('{"type": "input.text", "text": "\\ud83d"}', "valid Unicode"),
        ('["input.text"]', "must be a JSON object"),
        ('{"type": "session.config", "voice": "nobody"}', "'nobody' is not one of"),
        ('{"type": "session.close", "text": ""}', "other messages have none"),
        (b"\x00", "expected a JSON object"),
    ],
)
def test_a_wrong_message_is_refused_and_the_session_goes_on(
    gateway: GatewayRig, message: str | bytes, reason: str
) -> None:
    with opened(gateway) as socket:
        socket._connection.send(message)
        assert_error(socket, reason)
        socket.send(type="input.text", text="One two.")
        socket.send(type="input.done")
        assert socket.until("session.done")["total_sentences"] == 1


def test_too_many_sentences_end_the_session(gateway: GatewayRig) -> None:
    with opened(gateway) as socket:
        socket.send(type="input.text", text="Boats? " * 300)
        assert_refused(socket, "more than 256 sentences wait")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"voice": "nobody"}, "'nobody' is not one of"),
        ({"model": "gpt-5"}, "'gpt-5' is not one of"),
        ({"response_format": "m4a"}, "not one of pcm"),
        ({"speed": 3}, "speed: must be from 0.5 to 2"),
        ({"language": "Klingon"}, "language: 'Klingon' is neither an ISO code"),
        ({"split_granularity": "word"}, "split_granularity: Input should be"),
        ({"ref_audio": "file:///etc/passwd"}, "ref_audio: must be a data URL in base64"),
        ({"speaker_embedding": [0.5]}, "speaker_embedding: is not a known field"),
    ],
)
def test_a_wrong_session_is_refused(
    gateway: GatewayRig, config: dict[str, Any], reason: str
) -> None:
    with opened(gateway, **config) as socket:
        assert_refused(socket, reason)


def test_an_idle_socket_is_closed(gateway: GatewayRig) -> None:
    with opened(gateway) as socket:
        assert "no message for 2 s" in socket.until("error")["error"]["message"]
