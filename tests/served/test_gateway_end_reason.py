"""Speech that a limit of the server ends: clients of Riva and of Realtime learn the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import riva.client

from examples.speech import language_model
from tests.support.gateway_rig import VOICE, GatewayRig, serving, tokens_of
from tests.support.golden import TINY
from tests.support.realtime import audio_of, events_until, opened, say
from tests.support.server_rig import Rig
from token2wav_client import ClientVoice

REPEATS = 5


def tokens(text: str) -> list[int]:
    return [7] * 1000 if text == "Loop." else tokens_of(text)


@pytest.fixture(scope="module")
def gateway(voice: ClientVoice, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayRig]:
    folder = tmp_path_factory.mktemp("gateway")
    with (
        Rig.start(TINY, folder, f"stream: {{end_after_repeats: {REPEATS}}}") as rig,
        serving(language_model.create_app(tokens, 1000.0)) as port,
        GatewayRig.start(
            folder,
            grpc_url=rig.server.grpc_url,
            language_model_url=f"http://127.0.0.1:{port}/v1",
            voice=voice,
            settings={"voices": {"default": VOICE}},
            riva=True,
        ) as started,
    ):
        yield started


def test_a_realtime_response_is_incomplete(gateway: GatewayRig) -> None:
    with opened(gateway) as connection:
        say(connection, "Loop. One two three.")
        events = events_until(connection, "response.done")
        response = events[-1].response
        assert response.status == "incomplete"
        assert response.status_details.reason == "repeats"
        assert response.output[0].content[0].transcript == "Loop. One two three."
        words = len(tokens_of("One two three."))
        assert 2 * 960 * words < len(audio_of(events)) <= 2 * 960 * (words + REPEATS)
        say(connection, "One two three.")
        assert events_until(connection, "response.done")[-1].response.status == "completed"


def test_the_trailing_metadata_of_a_riva_call_have_the_reason(gateway: GatewayRig) -> None:
    service = riva.client.SpeechSynthesisService(riva.client.Auth(uri=gateway.riva))
    for text, reason in (("Loop.", {"end-reason": "repeats"}), ("One two three.", {})):
        call = service.synthesize_online(text, VOICE, sample_rate_hz=24_000)
        assert sum(len(piece.audio) for piece in call) > 0
        assert dict(call.trailing_metadata()) == reason
    service.auth.channel.close()
