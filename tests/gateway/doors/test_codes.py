"""Codes of a language model that the client runs: the gateway turns them into audio.

The gateway's own language model does not exist.
"""

from __future__ import annotations

import io
import wave
from typing import Any

import pytest

from testkit.rigs.gateway_rig import VOICE, GatewayRig, tokens_of
from testkit.rigs.gateway_speech import TEXT, assert_same, error_of, expected
from token2wav import Token2Wav
from token2wav_client import ClientVoice

SETTINGS = {"language_model": {"url": "http://127.0.0.1:9"}, "limits": {"speech_tokens": 1300}}


def test_codes_become_audio_without_a_language_model(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    codes = tokens_of(TEXT)
    refused, failed = (
        gateway.value("texts_total", outcome=outcome) for outcome in ("refused", "failed")
    )
    sent = {"codes": codes, "voice": VOICE, "response_format": "pcm"}
    with gateway.http() as http:
        for stream in (False, True):
            answer = http.post("/v1/stage/run", json={**sent, "stream": stream})
            assert ("content-length" in answer.headers) != stream
            assert_same(answer.content, expected(model, voice, TEXT))
        for wrong, status in (
            ({"codes": [-1]}, 400),
            ({"codes": [1] * 1301}, 400),
            ({"codes": [[1], [1, 2]]}, 400),
            ({"codes": [10_000]}, 400),
            ({"voice": None}, 400),
            ({"voice": ""}, 400),
            ({"max_tokens": 0}, 400),
            ({"codes": None}, 400),
            ({"stage_output": {"codes": {"audio": [1]}}}, 400),
            ({"request_id": "a\r\nset-cookie: b"}, 400),
            ({"speed": 2.1}, 400),
        ):
            assert error_of(http.post("/v1/stage/run", json=sent | wrong), status)["message"]
    # A failure of a server raises an alert, so wrong codes are no failure.
    assert gateway.value("texts_total", outcome="refused") == refused + 3
    assert gateway.value("texts_total", outcome="failed") == failed


@pytest.mark.parametrize(
    "codes", [[5, "x"], ["x"], [None], [True], [1.0], [[1], 2], [[1], ["x"]], 7, []]
)
@pytest.mark.parametrize("form", ["codes", "stage_output.codes.audio"])
def test_one_mistake_is_reported_for_any_number_of_wrong_codes(
    gateway: GatewayRig, codes: Any, form: str
) -> None:
    reason = "must be a list of integers, or a list of lists of integers"
    if codes == []:
        reason = "empty; a code is needed"
    elif isinstance(codes, list):
        codes = codes * 1000
    fields = {"codes": codes} if form == "codes" else {"stage_output": {"codes": {"audio": codes}}}
    with gateway.http() as http:
        answer = http.post("/v1/stage/run", json=fields | {"voice": VOICE})
    assert error_of(answer, 400)["message"] == f"{form}: {reason}"


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([[1], [1, 2]], "codes: rows of different lengths"),
        ([2**64], "codes: 18446744073709551616 is outside 0 to 2147483647"),
        ([[2**64]], "codes: 18446744073709551616 is outside 0 to 2147483647"),
    ],
)
def test_wrong_codes_are_named(gateway: GatewayRig, codes: Any, message: str) -> None:
    with gateway.http() as http:
        answer = http.post("/v1/stage/run", json={"codes": codes, "voice": VOICE})
    assert error_of(answer, 400)["message"] == message


def test_output_of_a_stage_of_vllm_omni_becomes_audio(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    """The body is that of vLLM-Omni's pull request 6883, with the other fields of a talker."""
    output = {"codes": {"audio": tokens_of(TEXT), "ref": []}, "sr": 24000}
    sent = {"stage_output": output, "request_id": "disagg-1", "voice": VOICE}
    with gateway.http() as http:
        for stream in (False, True):
            asked = {**sent, "response_format": "pcm", "stream": stream}
            answer = http.post("/v1/stage/run", json=asked)
            assert answer.headers["x-request-id"] == "disagg-1"
            assert_same(answer.content, expected(model, voice, TEXT))
        # The answer of their first stage as it is, and frames with a single code.
        whole = {"stage_output": output, "request_id": "disagg-1", "finished": True}
        frames = {"stage_output": {"codes.audio": [[token] for token in tokens_of(TEXT)]}}
        for form in (whole, frames | {"max_tokens": 65_536}):
            answer = http.post(
                "/v1/stage/run", json=form | {"voice": VOICE, "response_format": "pcm"}
            )
            assert_same(answer.content, expected(model, voice, TEXT))
        file = http.post("/v1/stage/run", json=sent).content
        with wave.open(io.BytesIO(file)) as opened:
            assert opened.getnframes() == 960 * len(tokens_of(TEXT))
        outputs: list[dict[str, object]] = [{}, {"codes": {}}]
        for wrong in outputs:
            answer = http.post("/v1/stage/run", json=sent | {"stage_output": wrong})
            assert "stage_output" in error_of(answer, 400)["message"]
