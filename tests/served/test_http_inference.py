"""Whole utterances over HTTP: server-sent events, through the front, with the library's samples."""

from __future__ import annotations

import http.client
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testkit.models.golden import GoldenSet
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.server_rig import Rig, voice_inputs
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav_server.launcher.front import BODY_BYTES

PATH = "/v2/models/token2wav/generate_stream"


def events(url: str, request: dict[str, Any], **headers: str) -> tuple[int, list[dict[str, Any]]]:
    connection = http.client.HTTPConnection(url, timeout=PATIENCE_SECONDS)
    connection.request(
        "POST",
        PATH,
        json.dumps(request),
        {name.replace("_", "-"): headers[name] for name in headers},
    )
    response = connection.getresponse()
    lines = [line.removeprefix(b"data:") for line in response if line.strip()]
    connection.close()
    return response.status, [json.loads(line) for line in lines]


def utterance(golden: GoldenSet, **parameters: Any) -> dict[str, Any]:
    inputs = {"tokens": golden.tokens, **voice_inputs(golden.voice)}
    return {name: array.ravel().tolist() for name, array in inputs.items()} | parameters


def test_audio_is_the_librarys(rig: Rig, golden: GoldenSet, whole: NDArray[np.float32]) -> None:
    """An option takes effect too: the first 8 equal tokens end the second utterance."""
    status, replies = events(rig.server.http_url, utterance(golden))
    assert status == 200
    assert [(event["chunk_index"], event["final"]) for event in replies] == [
        (0, False),
        (1, False),
        (2, True),
    ]
    audio = np.concatenate([np.array(event["audio"], np.float32) for event in replies])
    assert np.abs(audio - whole).max() <= SERVER_EQUALS_LIBRARY
    loop = utterance(golden, tokens=[7] * 50, audio_format="int16", end_after_repeats=8)
    _, [only] = events(rig.server.http_url, loop)
    assert (only["final"], only["end_reason"], len(only["audio"])) == (True, 1, 8 * 960)
    assert all(type(sample) is int for sample in only["audio"])


def test_an_error_of_the_body_or_the_model_is_the_answer(rig: Rig, golden: GoldenSet) -> None:
    for change, message in (
        ({"tokens": [4294967297]}, "tokens: 4294967297 is not an integer from -2147483648 to "),
        ({"samplerate": 8000}, "parameters: 'samplerate' is not a request parameter"),
    ):
        status, replies = events(rig.server.http_url, utterance(golden, **change))
        assert status == 400
        assert message in replies[0]["error"]


def test_a_disconnect_between_events_frees_the_stream(rig: Rig, golden: GoldenSet) -> None:
    long = utterance(golden, tokens=np.tile(golden.tokens, 40).tolist())
    connection = http.client.HTTPConnection(rig.server.http_url, timeout=PATIENCE_SECONDS)
    connection.request("POST", PATH, json.dumps(long))
    response = connection.getresponse()
    assert json.loads(response.readline().removeprefix(b"data:"))["chunk_index"] == 0
    assert any(rig.open_streams().values()), "the rest is still being computed"
    response.close()
    connection.close()
    rig.wait_until_empty()


def test_the_longest_utterance_of_the_default_limits_fits() -> None:
    tokens = {"tokens": [6560] * 15_000, "prompt_tokens": [6560] * 750}
    mel = (-11.5 * np.random.default_rng(0).random((1500, 80), np.float32)).ravel().tolist()
    text = json.dumps(
        tokens | {"prompt_mel": mel, "speaker_embedding": [-0.1234567890123456789] * 192}
    )
    assert 0.75 * BODY_BYTES < len(text) < 0.9 * BODY_BYTES


def test_http_inference_is_closed_by_default(limited: Rig, golden: GoldenSet) -> None:
    """The admin key opens it, both at the front and at Triton behind the front."""
    status, replies = events(limited.server.http_url, utterance(golden))
    assert status == 403
    assert replies[0]["error"].startswith("inference over HTTP is disabled: use gRPC")
    key = limited.server.access.admin_key
    status, replies = events(limited.server.http_url, utterance(golden), admin_key=key)
    assert (status, replies[-1]["final"]) == (200, True)
