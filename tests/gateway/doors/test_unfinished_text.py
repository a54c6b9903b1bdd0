"""Text that is spoken before its sentence ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from testkit.rigs import streaming_language_model
from testkit.rigs.gateway_fixtures import StartGateway
from testkit.rigs.gateway_rig import TOKENS_OF_A_WORD, GatewayRig
from testkit.rigs.gateway_socket import Socket, opened
from testkit.rigs.gateway_speech import assert_same, expected
from testkit.rigs.language_model import LanguageModel
from token2wav import Token2Wav
from token2wav_client import ClientVoice


@pytest.fixture
def streaming(start_gateway: StartGateway, tmp_path: Path) -> Iterator[GatewayRig]:
    with streaming_gateway(start_gateway, tmp_path) as gateway:
        yield gateway


def streaming_gateway(
    start_gateway: StartGateway, folder: Path, **options: Any
) -> AbstractContextManager[GatewayRig]:
    """A gateway in front of a language model that takes text as it comes."""
    template = folder / "streaming.yaml"
    template.write_text(streaming_language_model.TEMPLATE)
    settings = {"language_model": {"template": str(template)} | options}
    return start_gateway(streaming_language_model.app, settings=settings)


def test_three_words_are_spoken_before_the_fourth_is_sent(
    streaming: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    with opened(streaming) as socket:
        socket.send(type="input.text", text="One two three ")
        socket.until("audio.progress")  # no other text was sent
        socket.send(type="input.text", text="four. Five six")
        socket.send(type="input.done")
        assert socket.until("session.done")["total_sentences"] == 1
    assert not socket.of("error")
    same_count = "word " * (6 * streaming_language_model.TOKENS_OF_A_WORD // TOKENS_OF_A_WORD)
    assert_same(b"".join(socket.audio), expected(model, voice, same_count))
    [done] = socket.of("audio.done")
    assert done["usage"]["input_tokens"] == len("One two three four. Five six")


def test_a_text_that_grows_can_be_cancelled_and_another_one_follows(streaming: GatewayRig) -> None:
    with opened(streaming) as socket:
        socket.send(type="input.text", text="One two three ")
        socket.until("audio.progress")
        for _ in range(3):
            socket.send(type="cancel")
        assert socket.until("audio.cancelled")["heard_utterance_index"] == 0
        socket.send(type="input.text", text="Four five")
        socket.send(type="input.done")
        done = socket.until("session.done")
    assert (done["utterance_index"], done["total_sentences"]) == (1, 1)
    assert not socket.of("error")


def test_words_after_a_pause_are_another_text(start_gateway: StartGateway, tmp_path: Path) -> None:
    """The language model waits for words, and its time-out runs. No word is lost."""
    with (
        streaming_gateway(start_gateway, tmp_path, token_timeout_s=2) as gateway,
        opened(gateway) as socket,
    ):
        socket.send(type="input.text", text="One two three ")
        socket.until("audio.done")  # without other text
        socket.send(type="input.text", text="four. Five six")
        socket.send(type="input.done")
        assert socket.until("session.done")["total_sentences"] == 2
    assert not socket.of("error")
    counts = [done["usage"]["input_tokens"] for done in socket.of("audio.done")]
    assert counts == [len("One two three "), len("four. Five six")]


def test_a_megabyte_of_text_without_an_end(streaming: GatewayRig) -> None:
    with opened(streaming) as socket:
        socket.send(type="input.text", text="- " * 500_000)
        socket.send(type="input.done")
        assert socket.until("session.done")["total_sentences"] == 0
        for _ in range(2):
            socket.send(type="input.text", text="a" * 1_000_000)
        assert "sentences wait to be spoken" in socket.until("error")["message"]


@contextmanager
def waiting(start_gateway: StartGateway, text_wait_s: float) -> Iterator[Socket]:
    """Yields a socket of a gateway with this wait, whose language model needs whole texts."""
    settings = {"limits": {"text_wait_s": text_wait_s}}
    with (
        start_gateway(LanguageModel().app(), settings=settings) as gateway,
        opened(gateway) as socket,
    ):
        yield socket


def test_words_wait_from_their_own_arrival_on(start_gateway: StartGateway) -> None:
    with waiting(start_gateway, 3) as socket:
        socket.send(type="input.text", text="One. It rains ")
        socket.until("audio.done")
        assert_waits(socket, "It rains")
        socket.until("audio.done")
        time.sleep(2)
        socket.send(type="input.text", text="It was a ")
        assert_waits(socket, "It was a")


def assert_waits(socket: Socket, words: str) -> None:
    """Asserts that these words are spoken next, and after about three seconds. On a busy machine
    the `audio.done` before them is read late.
    """
    began = time.monotonic()
    assert socket.until("audio.start")["sentence_text"] == words
    assert time.monotonic() - began > 1.5


def test_words_without_an_end_are_spoken_after_a_while(start_gateway: StartGateway) -> None:
    """A language model that needs whole texts gets clauses, or the words that are complete."""
    with waiting(start_gateway, 0.1) as socket:
        for text in ("Well, I think so, and", " then it rai", "ned. "):
            socket.send(type="input.text", text=text)
            socket.until("audio.done")
        socket.send(type="input.done")
        assert socket.until("session.done")["total_sentences"] == 3
    said = [event["sentence_text"] for event in socket.of("audio.start")]
    assert said == ["Well, I think so,", "and then it", "rained."]
