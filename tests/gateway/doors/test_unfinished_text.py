"""Text that is spoken before its sentence ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.rigs import streaming_language_model
from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_rig import TOKENS_OF_A_WORD, GatewayRig
from testkit.rigs.gateway_socket import opened
from testkit.rigs.gateway_speech import assert_same, expected
from testkit.rigs.language_model import LanguageModel
from token2wav import Token2Wav
from token2wav_client import ClientVoice


@pytest.fixture
def streaming(rig: DoorServer, voice: ClientVoice, tmp_path: Path) -> Iterator[GatewayRig]:
    """A gateway in front of a language model that takes text as it comes."""
    template = tmp_path / "streaming.yaml"
    template.write_text(streaming_language_model.TEMPLATE)
    with GatewayRig.between(
        streaming_language_model.app,
        tmp_path,
        grpc_url=rig.server.grpc_url,
        voice=voice,
        settings={"language_model": {"template": str(template)}},
    ) as gateway:
        yield gateway


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
        socket.send(type="cancel")
        socket.until("audio.cancelled")
        socket.send(type="input.text", text="Four five")
        socket.send(type="input.done")
        done = socket.until("session.done")
    assert (done["utterance_index"], done["total_sentences"]) == (1, 1)
    assert not socket.of("error")


def test_words_without_an_end_are_spoken_after_a_while(
    rig: DoorServer, voice: ClientVoice, tmp_path: Path
) -> None:
    """A language model that needs whole texts gets clauses, or the words that are complete."""
    speaker = LanguageModel()
    with (
        GatewayRig.between(
            speaker.app(),
            tmp_path,
            grpc_url=rig.server.grpc_url,
            voice=voice,
            settings={"limits": {"text_wait_s": 0.1}},
        ) as gateway,
        opened(gateway) as socket,
    ):
        for text in ("Well, I think so, and", " then it rai", "ned. "):
            socket.send(type="input.text", text=text)
            socket.until("audio.done")
        socket.send(type="input.done")
        assert socket.until("session.done")["total_sentences"] == 3
    said = [event["sentence_text"] for event in socket.of("audio.start")]
    assert said == ["Well, I think so,", "and then it", "rained."]
