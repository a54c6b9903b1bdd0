"""Text to speech with the interface of CosyVoice's Triton recipe, on a real server: its contract,
its prompts, equality with the library, cancellation, and bad requests.
"""

from __future__ import annotations

import queue
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import soxr
import tritonclient.grpc as triton
import yaml
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from testkit.models.golden import ROOT
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.gateway_rig import TOKENS_OF_A_WORD, serving, tokens_of
from testkit.rigs.language_model import LanguageModel
from testkit.rigs.server_rig import Rig
from token2wav import RuntimeConfig, Token2Wav, Voice
from token2wav_server.launcher import binaries
from token2wav_server.launcher.access import Access
from token2wav_server.launcher.errors import ServerStartError
from token2wav_server.launcher.ports import Ports
from token2wav_server.launcher.process import TritonServer
from token2wav_voice import FrontEnd, Recording

DEMO = ROOT / "examples" / "demo_voice"
MODELS = ("token2wav", "cosyvoice3", "cosyvoice2")
# Entry point of a model as in earlier repositories.
ENTRY_POINT = """
import triton_python_backend_utils
from token2wav_gateway.doors.recipe import RecipeService

class TritonPythonModel:
    def initialize(self, args):
        self._service = RecipeService.start(args["model_config"])

    def execute(self, requests):
        return self._service.handle(requests)

    def finalize(self):
        self._service.close()
"""
REFERENCE_TEXT = "the words of the prompt"
TEXT = " one two three four five six"
TOKENS_OF_FIRST_AUDIO = 25 + 24 + 3  # the rest of a block of the prompt, a block, the look-ahead
SAME_AUDIO = 1e-4  # as in test_gateway: batches sum in another order


def said(text: str) -> list[int]:
    return tokens_of(text.rpartition(REFERENCE_TEXT)[2])


@pytest.fixture(scope="module")
def speaker() -> LanguageModel:
    return LanguageModel(said, holds_after=1000)  # so that no cancel is too late


@pytest.fixture(scope="module")
def recipe(speaker: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The recipe's models and the model `token2wav`, beside a language model server. The model for
    whole texts is a copy under the name that clients of the recipe use, as docs/recipe.md says.
    """
    if sys.version_info >= (3, 13):
        pytest.skip("Triton reads strings only with NumPy 1, which does not exist for Python 3.13")
    folder = tmp_path_factory.mktemp("recipe")
    repository = shutil.copytree(ROOT / "model_repository", folder / "repository")
    copy = (repository / "cosyvoice3_offline").rename(repository / "cosyvoice2")
    config = copy / "config.pbtxt"
    config.write_text(config.read_text().replace("cosyvoice3_offline", "cosyvoice2"))
    (copy / "1" / "cosyvoice3.py").write_text(ENTRY_POINT)
    with serving(speaker.app()) as port, pytest.MonkeyPatch.context() as patch:
        gateway = {
            "language_model": {"url": f"http://127.0.0.1:{port}/v1", "template": "cosyvoice3"},
            "voices": {"model": str(DEMO / "model"), "longest_s": 12},
            "limits": {"text_characters": 2000},
            "text": {"normalise": "wetext"},
        }
        (folder / "gateway.yaml").write_text(yaml.safe_dump(gateway))
        patch.setenv("TOKEN2WAV_GATEWAY", str(folder / "gateway.yaml"))
        access = Access(http_inference=True)
        with Rig.start(
            DEMO / "model", folder, access=access, models=MODELS, repository=repository
        ) as rig:
            yield rig


@pytest.fixture(scope="module")
def recording() -> NDArray[np.float32]:
    samples, rate = soundfile.read(DEMO / "recordings" / "prompt.wav", dtype="float32")
    return soxr.resample(samples, rate, 16_000).astype(np.float32)


@pytest.fixture(scope="module")
def expected(
    recording: NDArray[np.float32], tmp_path_factory: pytest.TempPathFactory
) -> NDArray[np.float32]:
    path = tmp_path_factory.mktemp("voice") / "recording.wav"
    soundfile.write(path, recording, 16_000, subtype="FLOAT")
    made = FrontEnd(DEMO / "model").voice(Recording.load(path))
    voice = Voice(made.prompt_tokens, made.prompt_mel, made.speaker_embedding)
    model = Token2Wav.load(DEMO / "model", runtime=RuntimeConfig(device="cpu"))
    return model.synthesize(np.array(tokens_of(TEXT), np.int32), voice)


def inputs_of(
    recording: NDArray[np.float32] | None,
    reference: str | None,
    text: str | bytes,
    padding: int = 0,
) -> list[triton.InferInput]:
    """Makes the inputs as the recipe's client makes them."""
    tensors: dict[str, NDArray[Any]] = {"target_text": np.array([[text]], object)}
    if recording is not None:
        tensors["reference_wav"] = np.pad(recording, (0, padding))[None]
        tensors["reference_wav_len"] = np.array([[len(recording)]], np.int32)
    if reference is not None:
        tensors["reference_text"] = np.array([[reference]], object)
    inputs = []
    for name, value in tensors.items():
        inputs.append(triton.InferInput(name, value.shape, np_to_triton_dtype(value.dtype)))
        inputs[-1].set_data_from_numpy(value)
    return inputs


def streamed(
    rig: Rig, inputs: list[triton.InferInput], heard: Callable[[], object] = lambda: None
) -> list[NDArray[np.float32]]:
    """Returns the responses of a streamed request, as the recipe's client receives them.

    Args:
        rig: server.
        inputs: inputs of the request.
        heard: called when audio arrives.
    """
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(rig.server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            "cosyvoice3",
            inputs,
            request_id="1",
            outputs=[triton.InferRequestedOutput("waveform")],
            enable_empty_final_response=True,
        )
        chunks: list[NDArray[np.float32]] = []
        while True:
            result, error = answers.get(timeout=PATIENCE_SECONDS)
            if error is not None:
                raise error
            if result.get_response().parameters["triton_final_response"].bool_param:
                return chunks
            chunks.append(result.as_numpy("waveform").reshape(-1))
            heard()


def test_streamed_audio_equals_the_library(
    recipe: Rig,
    speaker: LanguageModel,
    recording: NDArray[np.float32],
    expected: NDArray[np.float32],
) -> None:
    chunks = streamed(recipe, inputs_of(recording, REFERENCE_TEXT, TEXT, padding=8000))
    assert len(chunks) > 1
    audio = np.concatenate(chunks)
    assert audio.shape == expected.shape == (960 * TOKENS_OF_A_WORD * len(TEXT.split()),)
    assert np.abs(audio - expected).max() <= SAME_AUDIO
    body = speaker.bodies[-1]
    user, assistant = (message["content"] for message in body["messages"])
    assert user == f"You are a helpful assistant.<|endofprompt|>{REFERENCE_TEXT}{TEXT}"
    assert re.fullmatch(r"(<\|s_\d+\|>)+", assistant)
    assert (body["stream"], body["top_k"], body["stop"]) == (True, 50, ["<|eos1|>", "<|eos|>"])


def test_the_prompt_has_instructions_and_words_for_numbers(
    recipe: Rig, speaker: LanguageModel, recording: NDArray[np.float32]
) -> None:
    reference = f"Whisper.<|endofprompt|>{REFERENCE_TEXT}"
    assert streamed(recipe, inputs_of(recording, reference, " It costs $5."))
    prompt = speaker.bodies[-1]["messages"][0]["content"]
    assert prompt == f"{reference} It costs five dollars."


def test_the_whole_over_http_equals_the_library(
    recipe: Rig, recording: NDArray[np.float32], expected: NDArray[np.float32]
) -> None:
    document = {
        "inputs": [
            {
                "name": "reference_wav",
                "shape": [1, len(recording)],
                "datatype": "FP32",
                "data": recording[None].tolist(),
            },
            {
                "name": "reference_wav_len",
                "shape": [1, 1],
                "datatype": "INT32",
                "data": [[len(recording)]],
            },
            {
                "name": "reference_text",
                "shape": [1, 1],
                "datatype": "BYTES",
                "data": [REFERENCE_TEXT],
            },
            {"name": "target_text", "shape": [1, 1], "datatype": "BYTES", "data": [TEXT]},
        ]
    }
    url = f"http://{recipe.server.http_url}/v2/models/cosyvoice2/infer"
    answer = httpx.post(
        url, json=document, params={"request_id": "0"}, timeout=PATIENCE_SECONDS
    ).json()
    audio = np.array(answer["outputs"][0]["data"], np.float32)
    assert audio.shape == expected.shape
    assert np.abs(audio - expected).max() <= SAME_AUDIO


def test_a_client_that_leaves_cancels_both_requests(
    recipe: Rig, speaker: LanguageModel, recording: NDArray[np.float32]
) -> None:
    before, ended = speaker.cancelled, recipe.ended()["cancelled"]
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(recipe.server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            "cosyvoice3", inputs_of(recording, REFERENCE_TEXT, " slow" * 300), request_id="1"
        )
        assert answers.get(timeout=PATIENCE_SECONDS)[1] is None
        client.stop_stream(cancel_requests=True)
    until(lambda: speaker.cancelled == before + 1)
    until(lambda: recipe.ended()["cancelled"] == ended + 1)


def test_audio_comes_while_the_language_model_speaks(
    recipe: Rig,
    speaker: LanguageModel,
    recording: NDArray[np.float32],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The language model waits after the tokens of the first chunk until audio arrives."""
    monkeypatch.setattr(speaker, "holds_after", TOKENS_OF_FIRST_AUDIO)
    inputs = inputs_of(recording, REFERENCE_TEXT, " one" * 20)
    chunks = streamed(recipe, inputs, heard=speaker.goes_on.set)
    assert sum(map(len, chunks)) == 960 * TOKENS_OF_A_WORD * 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": " "}, "target_text: empty"),
        ({"text": b"\xff\xfe"}, "target_text: expected UTF-8"),
        ({"text": "x" * 2001}, "target_text: 2001 characters; at most 2000"),
        ({"reference": "x" * 2001}, "reference_text: 2001 characters; at most 2000"),
        ({"recording": None}, "reference_wav: missing; there is no default voice"),
        ({"recording": np.full(32_000, np.nan, np.float32)}, "reference_wav: has NaN"),
        ({"recording": np.zeros(32_000, np.float32)}, "reference_wav: the recording"),
        ({"recording": np.ones(16_000 * 13, np.float32) / 8}, "reference_wav: 13.0 s; at most 12"),
        ({"recording": np.zeros(0, np.float32)}, "reference_wav_len: 0, but reference_wav has"),
        ({"text": " nothing"}, "language model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_request_gets_one_sentence(
    recipe: Rig, recording: NDArray[np.float32], change: dict[str, Any], message: str
) -> None:
    fields = {"recording": recording, "reference": REFERENCE_TEXT, "text": TEXT, **change}
    with pytest.raises(InferenceServerException, match=message) as caught:
        streamed(recipe, inputs_of(**fields, padding=10))
    assert "\n" not in str(caught.value.message())


@pytest.mark.python_models
def test_a_triton_that_cannot_read_strings_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(binaries, "STUB_NUMPY_FOLDER", tmp_path / "nothing")
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump({"voices": {"model": str(DEMO)}}))
    monkeypatch.setenv("TOKEN2WAV_GATEWAY", str(tmp_path / "gateway.yaml"))
    server = TritonServer(
        DEMO / "model",
        models=MODELS[:2],
        ports=Ports.free(),
        log_file=tmp_path / "triton.log",
    )
    with pytest.raises(ServerStartError):
        server.start()
    assert "with which this Triton cannot read strings" in (tmp_path / "triton.log").read_text()
