"""Requests as the public pages of other servers write them: the gateway accepts them unchanged."""

from __future__ import annotations

import base64
import shutil
from typing import Any

import pytest
import yaml

from examples import demo
from examples.demo_voice.recordings import PROMPT
from testkit.rigs.gateway_rig import PROMPT_TEXT, VOICE, GatewayRig, tokens_of
from testkit.rigs.gateway_socket import opened
from testkit.rigs.gateway_speech import error_of
from testkit.rigs.language_model import LanguageModel
from token2wav_gateway.doors.requests import SpeechRequest
from token2wav_gateway.voices.voice_folder import Voice

TEXT = "Hello, how are you?"
RECORDING = "data:audio/wav;base64," + base64.b64encode(PROMPT.read_bytes()).decode()
QWEN, COSYVOICE = "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice", "FunAudioLLM/Fun-CosyVoice3-0.5B-2512"
CLONE = {"ref_audio": RECORDING, "ref_text": PROMPT_TEXT}

# Fields besides the text, by their page.
PAGES: dict[str, dict[str, Any]] = yaml.safe_load("""
# vLLM-Omni, docs/serving/speech_api.md
quick start: {voice: vivian, language: English}
openai package: {model: Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice, voice: vivian}
instructions: {voice: vivian, instructions: Speak with great enthusiasm}
voice design: {task_type: VoiceDesign, instructions: "A warm, friendly female voice"}
clone: {task_type: Base, non_streaming_mode: true}
table of parameters:
  {task_type: null, language: Auto, instructions: "", max_new_tokens: 2048,
   initial_codec_chunk_frames: null, non_streaming_mode: null, stream: false, stream_format: null,
   ref_audio: null, ref_text: null, speed: 1.0, x_vector_only_mode: null, response_format: wav,
   voice: vivian, model: null}
# vLLM-Omni, examples/online_serving/text_to_speech
default voice: {voice: default, response_format: wav}
pcm: {voice: default, stream: true, stream_format: audio, response_format: pcm}
client of Qwen3-TTS:
  {model: Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice, voice: vivian, response_format: aac,
   task_type: Base, language: Auto, max_new_tokens: 1024, x_vector_only_mode: true}
client of CosyVoice3:
  {model: FunAudioLLM/Fun-CosyVoice3-0.5B-2512, response_format: pcm, stream: true, seed: 42,
   max_new_tokens: 2048, extra_params: {temperature: 0.8}}
client over a WebSocket:
  {speaker: Vivian, task_type: CustomVoice, language: Auto, response_format: wav, speed: 1.0}
# tts_bench of nari-labs/benchmarks, for its target vllm-omni, with --request-param top_k=20
tts_bench:
  {model: Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice, voice: vivian, language: English, stream: true,
   stream_format: audio, non_streaming_mode: false, response_format: pcm, top_k: 20}
# vLLM-Omni, vllm bench serve --omni --backend openai-audio-speech
vllm bench:
  {model: Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice, stream: true, stream_format: audio,
   response_format: pcm, temperature: 0.0}
# OpenAI, audio/speech/create
create speech: {model: gpt-4o-mini-tts, voice: alloy}
events: {model: gpt-4o-mini-tts, voice: alloy, stream_format: sse}
dated model:
  {model: gpt-4o-mini-tts-2025-12-15, voice: {id: Vivian}, response_format: flac,
   instructions: Speak in a cheerful and positive tone.}
""")
# A recording is a data URL, as the clients of these pages send a file.
CLONES = ("clone", "client of Qwen3-TTS", "client of CosyVoice3")
REQUESTS = PAGES | {name: PAGES[name] | CLONE for name in CLONES}

SETTINGS = {
    "voices": {"model": demo.MODEL, "default": VOICE},
    "models": ["token2wav", "gpt-4o-mini-tts", "gpt-4o-mini-tts-2025-12-15", QWEN, COSYVOICE],
}


@pytest.fixture(scope="module", autouse=True)
def _voices_of_the_pages(gateway: GatewayRig) -> None:
    for name in ("vivian", "Vivian"):
        copy = gateway.voices / f"{name}.safetensors"
        shutil.copy(gateway.voices / f"{VOICE}.safetensors", copy)


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
def test_a_public_request_is_accepted(
    gateway: GatewayRig, speaker: LanguageModel, fields: dict[str, Any]
) -> None:
    # Some pages write a slash at the end of the path.
    path = "/v1/audio/speech/" if fields is REQUESTS["quick start"] else "/v1/audio/speech"
    with gateway.http() as http:
        answer = http.post(path, json={"input": TEXT, **fields})
    assert answer.status_code == 200, answer.text
    if fields.get("stream_format") == "audio":
        assert len(answer.content) == 2 * 960 * len(tokens_of(TEXT))
    body, sampling = speaker.bodies[-1], fields | fields.get("extra_params", {})
    assert body.get("max_tokens") == fields.get("max_new_tokens")
    for name in ("seed", "temperature", "top_k"):
        assert body.get(name) == sampling.get(name)


@pytest.mark.parametrize("name", [QWEN, QWEN.replace("/", "%2F")])
def test_a_model_may_have_a_slash_in_its_name(gateway: GatewayRig, name: str) -> None:
    with gateway.http() as http:
        assert http.get(f"/v1/models/{name}").json()["id"] == QWEN


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
def test_a_websocket_accepts_the_same_fields(gateway: GatewayRig, fields: dict[str, Any]) -> None:
    config = {"voice": None, "stream_audio": None, "word_timestamps": None, **fields}
    with opened(gateway, **config, split_granularity=None) as socket:
        socket.send(type="input.text", text=TEXT)
        socket.send(type="input.done", text=None)
        socket.until("session.done")
    assert not socket.of("error")
    [start] = socket.of("audio.start")
    assert start["channels"] == 1
    assert start["format"] == fields.get("response_format", "wav")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": " "}, "input: empty; a text is needed"),
        ({"input": "\U0001f600 ..."}, "input: no letter or digit; a text is needed"),
        ({"ref_audio": "data:audio/wav;base64,UklGRg=="}, "ref_audio: the recording: cannot be"),
        ({"ref_text": "x" * 1001}, "ref_text: 1001 characters; at most 1000 are allowed"),
    ],
)
def test_a_clone_that_cannot_be_made(
    gateway: GatewayRig, fields: dict[str, str], message: str
) -> None:
    with gateway.http() as http:
        answer = http.post("/v1/audio/speech", json={"input": TEXT, **CLONE, **fields})
    error = error_of(answer, 413 if "1001" in message else 400)
    assert error["message"].startswith(message)


@pytest.mark.parametrize(
    ("language", "name", "code"),
    [
        (None, "Auto", "en"),
        ("Auto", "Auto", "en"),
        ("english", "English", "en"),
        ("de", "German", "de"),
        ("pt-BR", "Portuguese", "pt"),
        ("nl", "nl", "nl"),
    ],
)
def test_the_name_of_a_language(language: str | None, name: str, code: str) -> None:
    body = SpeechRequest.model_validate({"input": "It rains.", "language": language})
    assert (body.text("", Voice("")).language, body.language_code) == (name, code)


def test_sampling_outside_extra_params_goes_first() -> None:
    sampling = {"top_p": 0.5, "extra_params": {"top_p": 0.9, "temperature": 0.7}, "seed": 3}
    body = SpeechRequest.model_validate({"input": "It rains.", **sampling})
    assert body.sampling == {"top_p": 0.5, "temperature": 0.7, "seed": 3}
