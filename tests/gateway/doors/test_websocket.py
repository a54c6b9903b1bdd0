"""WebSocket of the gateway: text in pieces, audio per sentence, and cancellation."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import wave
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import VOICE, GatewayRig, tokens_of
from testkit.rigs.gateway_socket import CONFIG, Socket, opened
from testkit.rigs.gateway_speech import assert_same, expected
from testkit.rigs.language_model import LanguageModel
from token2wav import Token2Wav
from token2wav_client import ClientVoice
from token2wav_gateway.words.normaliser import Normaliser

TEXT = "One two three. Four five! Six seven eight nine"
SENTENCES = ["One two three.", "Four five!", "Six seven eight nine"]
SLOW = "slow " * 790  # nearly the longest input
SETTINGS = {"aligner": {"name": "Letters", "timeout_s": 60}}


@pytest.fixture(scope="module")
def speaker(made_up_aligners: object) -> LanguageModel:
    """Language model of a gateway that can import the aligners."""
    return LanguageModel(pace=1000.0)


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
    assert {event["utterance_index"] for event in socket.events} == {0}
    positions = {event["sentence_index"] for event in socket.of("audio.delta")}
    assert positions == ({0, 1, 2} if deltas else set())
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


def test_two_utterances_of_vllm_omni_over_one_connection(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    """By default each sentence is one message with a whole file."""
    with opened(gateway, stream_audio=None) as socket:
        for text, count in (("One two three. Four five!", 2), ("Six seven.", 1)):
            socket.send(type="input.text", text=text)
            socket.send(type="input.done")
            assert socket.until("session.done")["total_sentences"] == count
        socket.send(type="session.close")
        with pytest.raises(ConnectionClosed) as closed:
            socket.until("never")
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1000
    starts = socket.of("audio.start")
    places = [(start["utterance_index"], start["sentence_index"]) for start in starts]
    assert places == [(0, 0), (0, 1), (1, 0)]
    assert [event["utterance_index"] for event in socket.of("session.done")] == [0, 1]
    for start, file, done in zip(starts, socket.audio, socket.of("audio.done"), strict=True):
        assert (start["format"], done["total_bytes"], done["error"]) == ("wav", len(file), False)
        text = start["sentence_text"]
        with wave.open(io.BytesIO(file)) as wav:
            assert wav.getframerate() == start["sample_rate"]
            assert_same(wav.readframes(wav.getnframes()), expected(model, voice, text))
        assert done["usage"]["output_tokens"] == len(tokens_of(text))
        assert done["usage"]["input_tokens"] == len(text)


def test_streamed_audio_of_an_utterance_that_is_not_split(gateway: GatewayRig) -> None:
    """The configuration stays for the second utterance."""
    texts = ["One two three. " * 9 + "Four!", "Five six seven eight nine ten. " * 5 + "End."]
    whole = {"split_granularity": "none", "task_type": "CustomVoice", "language": "Auto"}
    with opened(gateway, response_format="pcm", speed=2, **whole) as socket:
        for text in texts:
            socket.send(type="input.text", text=text)
            socket.send(type="input.done")
            socket.until("session.done")
            sent = socket.of("audio.done")[-1]["total_bytes"]
            assert sent == sum(map(len, socket.audio)) == 2 * 480 * len(tokens_of(text))
            assert len(socket.audio) > 1
            socket.audio.clear()
    assert [start["sentence_text"] for start in socket.of("audio.start")] == texts


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


def test_a_sentence_that_is_cancelled_before_it_begins_has_no_position(
    gateway: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = threading.Event()

    async def change(*_: object) -> None:
        changing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Normaliser, "__call__", change)
    with opened(gateway) as socket:
        socket.send(type="input.text", text="It rains. Now.")
        assert changing.wait(PATIENCE_SECONDS)
        socket.send(type="cancel")
        cancelled = socket.until("audio.cancelled")
    assert cancelled["utterance_index"] is cancelled["sentence_index"] is None
    assert not socket.of("audio.start")


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


def test_words_as_in_vllm_omni(gateway: GatewayRig) -> None:
    """The audio arrives as chunks without times, and others have the words of the audio before."""
    with opened(gateway, word_timestamps=True) as socket:
        socket.send(type="input.text", text=TEXT)
        socket.send(type="input.done")
        socket.until("audio.done")
    chunks = socket.of("audio.chunk")
    assert [chunk["chunk_id"] for chunk in chunks] == list(range(len(chunks)))
    audio, last = [chunk for chunk in chunks if chunk["audio_b64"]], chunks[-1]
    assert all(chunk["timestamps"] is None for chunk in audio)
    content = b"".join(base64.b64decode(chunk["audio_b64"]) for chunk in audio)
    assert last["audio_b64"] == ""
    assert last["chunk_end_ms"] == audio[-1]["chunk_end_ms"] == round(len(content) / 48)
    words = [word for chunk in chunks for word in chunk["timestamps"] or ()]
    assert "".join(word["word"] for word in words) == SENTENCES[0].replace(" ", "")
    for chunk in chunks:
        assert all(word["end_ms"] <= chunk["chunk_end_ms"] for word in chunk["timestamps"] or ())
    [done] = socket.of("audio.done")
    assert done["total_bytes"] == len(content)


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
    assert error["type"] == "invalid_request_error"


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


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"voice": "nobody"}, "'nobody' is not one of"),
        ({"model": "gpt-5"}, "'gpt-5' is not one of"),
        ({"response_format": "m4a"}, "not one of pcm"),
        ({"split_granularity": "word"}, "split_granularity: Input should be"),
        ({"speaker_embedding": [0.5]}, "speaker_embedding: is not a known field"),
        ({"word_timestamps": True, "stream_audio": False}, "word_timestamps: needs stream_audio"),
    ],
)
def test_a_wrong_session_is_refused(
    gateway: GatewayRig, config: dict[str, Any], reason: str
) -> None:
    with opened(gateway, **config) as socket:
        assert_refused(socket, reason)
