"""Ensemble of the tiny model, whose three models of Triton run in the process of the test.
tests/served/ has them on a real server.
"""

from __future__ import annotations

import importlib
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray

from testkit.batches import WHOLE_BLOCKS
from testkit.echo_mark import echoed
from testkit.models.folders import write_folder
from testkit.models.tiny_model import TINY, demo_tokens, demo_voice
from testkit.models.yaml_edits import edit_text
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.plugins import installed
from testkit.triton import FakeTriton, Request, triton_module
from token2wav import StreamConfig, Token2Wav, Voice
from token2wav.assembly import withheld_samples
from token2wav.config import ServerConfig, load_server_config
from token2wav.errors import CheckpointError, ConfigError, DeviceLostError
from token2wav.published.registry import read_config
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.options import UtteranceOptions
from token2wav_server.model_process import CANARY_VARIABLE

FINAL = FakeTriton.TRITONSERVER_RESPONSE_COMPLETE_FINAL
START, END = 1, 2
STAGES = ("flow", "vocoder")
ROUNDING = 1e-4  # batches sum in another order; F0 takes it into the phase
SETTINGS = {"stream": {"steps": [4, 2]}, "runtime": {"device": "cpu"}}


@dataclass
class Running:
    """Ensemble whose models run in this process."""

    triton: FakeTriton
    ensemble: Any

    def stage(self, name: str) -> Any:
        return self.triton.models[name]._stage

    def is_empty(self) -> bool:
        return not any(self.stage(name).open_streams for name in STAGES)

    def send(
        self,
        tokens: NDArray[np.int32],
        voice: Voice | None = None,
        flags: int = START | END,
        sequence: int = 7,
        **parameters: Any,
    ) -> Request:
        """Sends tokens of an utterance."""
        inputs = {"tokens": tokens, **(vars(voice) if voice else {})}
        request = Request(inputs, sequence, flags, parameters)
        self.ensemble.execute([request])
        return request


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    """Starts an ensemble, which must have freed all streams at the end."""
    monkeypatch.setenv(CANARY_VARIABLE, "secret")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # a limit for a process
    started: list[Running] = []

    def start(folder: Path = TINY, **settings: dict[str, Any]) -> Running:
        file = tmp_path / "server.yaml"
        file.write_text(yaml.safe_dump(SETTINGS | settings))
        monkeypatch.setenv("TOKEN2WAV_MODEL", str(folder))
        monkeypatch.setenv("TOKEN2WAV_CONFIG", str(file))
        stage_model = importlib.import_module("token2wav_server.ensemble.stage_model")
        triton.models = {name: stage_model.StageModel(name) for name in STAGES}
        ensemble = importlib.import_module("token2wav_server.ensemble.ensemble")
        server = load_server_config(file)
        started.append(Running(triton, ensemble.Ensemble(folder, server, STAGES)))
        return started[0]

    with triton_module() as triton:
        yield start
        for running in started:
            until(running.is_empty)
            running.ensemble.close()


def heard(request: Request) -> list[dict[str, Any]]:
    """Returns the responses to a request, which must succeed."""
    chunks = []
    while not (answer := request.next())[1]:
        chunks.append(answer[0])
    assert answer == (None, FINAL)
    return chunks


def audio_of(chunks: list[dict[str, Any]]) -> NDArray[Any]:
    return np.concatenate([chunk["audio"] for chunk in chunks])


@pytest.mark.parametrize(
    ("prompt_tokens", "options"),
    [
        (0, {}),
        (30, {"steps": 2}),
        (25, {"speed": 1.25}),
        (25, {"audio_format": "mulaw", "sample_rate": 8000}),
    ],
)
def test_the_audio_is_that_of_the_library(
    start: Callable[..., Running], prompt_tokens: int, options: dict[str, Any]
) -> None:
    """Two messages: the first chunk is early audio, and the second one repeats its tokens."""
    running, tokens, voice = start(), demo_tokens(80), demo_voice(prompt_tokens)
    chunks = heard(running.send(tokens[:11], voice, START, **options))
    assert chunks
    chunks += heard(running.send(tokens[11:], None, END))
    assert [chunk["final"].item() for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    model = Token2Wav.load(TINY, stream=StreamConfig(steps=(4, 2)))
    audio_format = AudioFormat(options.get("audio_format", "float32"), options.get("sample_rate"))
    utterance = UtteranceOptions(
        options.get("steps", 0), audio_format=audio_format, speed=options.get("speed", 1.0)
    )
    with model.stream(voice, utterance) as stream:
        expected = stream.push(tokens[:11]) + stream.finish(tokens[11:])
    audio, whole = audio_of(chunks), np.concatenate([chunk.audio for chunk in expected])
    assert (audio.shape, audio.dtype) == (whole.shape, whole.dtype)
    if audio.dtype == np.float32:
        assert np.abs(audio - whole).max() <= ROUNDING


def test_audio_is_marked_once(start: Callable[..., Running], tmp_path: Path) -> None:
    code, tokens = "from testkit.echo_mark import Echo", demo_tokens(80)
    with installed(tmp_path, "a_mark", code, "token2wav.audio_marks", ["Echo"]):
        stream = {"first_tokens": 0, "mark": "Echo"}
        audio = audio_of(heard(start(stream=stream).send(tokens, demo_voice(0))))
    whole = Token2Wav.load(TINY, stream=WHOLE_BLOCKS).synthesize(tokens, demo_voice(0))
    assert np.abs(audio - echoed(whole)).max() <= ROUNDING


def test_a_limit_ends_a_stream(start: Callable[..., Running]) -> None:
    loop = np.full(60, 7, np.int32)
    *_, last = heard(start().send(loop, demo_voice(0), end_after_repeats=8))
    assert (last["final"].item(), last["end_reason"].item()) == (True, 1)


@pytest.mark.parametrize(("block_tokens", "hop"), [(0, 25), (10, 20)])
def test_a_chunk_ends_with_a_block_of_the_settings(
    start: Callable[..., Running], tmp_path: Path, block_tokens: int, hop: int
) -> None:
    folder = write_folder("cosyvoice2", tmp_path / "model")
    edit_text(folder / "cosyvoice2.yaml", ("macaron", "use_dynamic_chunk: True\n        macaron"))
    stream = {"first_tokens": 0, "block_tokens": block_tokens}
    running, stops = start(folder, stream=stream), list[int]()
    flow = running.stage("flow")
    advance = flow.advance

    def recorded(batch: Any) -> Any:
        stops.extend(chunk.stop for _, chunk in batch)
        return advance(batch)

    flow.advance = recorded
    heard(running.send(demo_tokens(80), demo_voice(0)))
    assert stops[0] == hop


def test_a_stage_without_room_refuses_the_stream(start: Callable[..., Running]) -> None:
    running = start(runtime={"device": "cpu", "cache_mib": 10})
    answer, flags = running.send(demo_tokens(4), demo_voice(700)).next()
    assert flags == FINAL
    assert answer.startswith("UNAVAILABLE cache: ")
    assert len(audio_of(heard(running.send(demo_tokens(4), demo_voice(0))))) == 4 * 960


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_ends_the_streams_of_its_batch(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    running = start()

    def broken(_: Any) -> None:
        raise RuntimeError("the device\nis gone")

    with monkeypatch.context() as patch:
        patch.setattr(running.stage(stage), "advance", broken)
        answer, flags = running.send(demo_tokens(4), demo_voice(0)).next()
    assert (answer, flags) == ("INTERNAL backend: the device is gone", FINAL)
    assert len(audio_of(heard(running.send(demo_tokens(4), demo_voice(0))))) == 4 * 960


def test_a_lost_gpu_ends_the_process_of_the_stage(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, ends = start(), list[str]()

    def lost(_: Any) -> None:
        raise DeviceLostError("backend: the GPU cannot be used any more")

    monkeypatch.setattr(running.stage("flow"), "advance", lost)
    module = importlib.import_module("token2wav_server.ensemble.stage_model")
    monkeypatch.setattr(module, "end_process", lambda: ends.append("lost"))
    answer, _ = running.send(demo_tokens(4), demo_voice(0)).next()
    assert answer == "INTERNAL backend: the GPU cannot be used any more"
    assert ends == ["lost"]


def test_a_client_that_leaves_frees_its_stream_in_all_stages(start: Callable[..., Running]) -> None:
    running = start()
    request = running.send(demo_tokens(11), demo_voice(0), START, keep_open=True)
    assert len(request.next()[0]["audio"])
    assert all(running.stage(name).open_streams for name in STAGES)
    request.gone = True
    assert request.next() == ("NOT_FOUND stream: it was cancelled", FINAL)


def test_an_opening_does_not_wait_for_the_batch_of_the_vocoder(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the vocoder computes a batch, the flow opens a new stream and computes its chunk."""
    running = start()
    flow, vocoder = running.stage("flow"), running.stage("vocoder")
    entered, released, chunks = threading.Event(), threading.Event(), list[int]()
    compute, synthesize = flow.advance, vocoder.advance

    def recorded(batch: Any) -> Any:
        chunks.extend(handle for handle, _ in batch)
        return compute(batch)

    def held(batch: Any) -> Any:
        entered.set()
        assert released.wait(PATIENCE_SECONDS)
        return synthesize(batch)

    monkeypatch.setattr(flow, "advance", recorded)
    monkeypatch.setattr(vocoder, "advance", held)
    requests = [running.send(demo_tokens(4), demo_voice(0))]
    try:
        assert entered.wait(PATIENCE_SECONDS)
        requests.append(running.send(demo_tokens(4), demo_voice(0), sequence=8))
        until(lambda: len(set(chunks)) == 2)
    finally:
        released.set()
    assert [len(audio_of(heard(request))) for request in requests] == [4 * 960, 4 * 960]


@pytest.mark.parametrize("failing", STAGES)
def test_calls_that_fail_lose_no_end(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Triton loses the reply to an opening, and then the call of its end. The next call has the end
    again, and the fixture waits until the stages are empty.
    """
    running, left = start(), 2
    model = running.triton.models[failing]
    execute = model.execute

    def lossy(requests: list[Any]) -> Any:
        nonlocal left
        left -= 1
        answers = None if left == 0 else execute(requests)
        return answers if left < 0 else ["INTERNAL no room in /dev/shm"]

    monkeypatch.setattr(model, "execute", lossy)
    answer, _ = running.send(demo_tokens(4), demo_voice(0)).next()
    assert answer == f"INTERNAL backend: {failing}: INTERNAL no room in /dev/shm"
    until(lambda: left <= 0)
    assert len(audio_of(heard(running.send(demo_tokens(4), demo_voice(0))))) == 4 * 960


def test_an_opening_that_overtakes_the_end_of_a_stream_brings_it_along(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the cache may have no room for the new stream."""
    running = start()
    flow, request_to = running.stage("flow"), running.triton.InferenceRequest
    entered, released, counts = threading.Event(), threading.Event(), list[int]()
    open_stream = flow.open

    def counted(*arguments: Any) -> Any:
        counts.append(flow.open_streams)
        return open_stream(*arguments)

    def delayed(**arguments: Any) -> Any:
        request = request_to(**arguments)

        def execute() -> Any:
            if threading.current_thread().name.startswith("close"):
                entered.set()
                assert released.wait(PATIENCE_SECONDS)
            return request.exec()

        return SimpleNamespace(exec=execute)

    monkeypatch.setattr(flow, "open", counted)
    monkeypatch.setattr(running.triton, "InferenceRequest", delayed)
    try:
        heard(running.send(demo_tokens(4), demo_voice(0)))
        assert entered.wait(PATIENCE_SECONDS)
        heard(running.send(demo_tokens(4), demo_voice(0), sequence=8))
    finally:
        released.set()
    assert counts == [0, 0]


def test_a_stage_that_was_started_again_confuses_no_streams(start: Callable[..., Running]) -> None:
    running = start()
    request = running.send(demo_tokens(11), demo_voice(0), START, keep_open=True)
    assert len(request.next()[0]["audio"])
    assert all(running.stage(name).open_streams for name in STAGES)
    model = running.triton.models["flow"]
    running.triton.models["flow"] = type(model)("flow")
    other = running.send(demo_tokens(4), demo_voice(0), sequence=8)
    assert len(audio_of(heard(other))) == 4 * 960
    request.gone = True
    assert request.next() == ("NOT_FOUND stream: it was cancelled", FINAL)


def test_a_client_cannot_call_a_stage(start: Callable[..., Running]) -> None:
    running = start()
    calls = importlib.import_module("token2wav_server.ensemble.calls")
    for content in (
        calls.call_bytes("a guess", calls.Call("close", None, {}, [1])),
        np.zeros(0, np.uint8),
        np.ones(100, np.uint8),
    ):
        [answer] = running.triton.models["flow"].execute([Request({"call": content})])
        assert answer.startswith("INTERNAL ")
        if len(content) not in (0, 100):
            assert answer.endswith("call: only the ensemble may call this model, not a client")


@pytest.mark.parametrize("lookahead_frames", [0, 2])
def test_withheld_samples_are_those_of_the_vocoder(lookahead_frames: int) -> None:
    stream = StreamConfig(lookahead_frames=lookahead_frames)
    model = Token2Wav.load(TINY, stream=stream)
    withheld = model.pipeline.stages["vocoder"].withheld_samples
    assert withheld_samples(model.config, stream) == withheld > 0


def test_a_start_that_fails(
    start: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = write_folder("mimi", tmp_path)
    with pytest.raises(ConfigError, match="has no flow stage, only decoder; serve it without the"):
        start(codec)
    with monkeypatch.context() as patch:
        patch.setattr(type(read_config(TINY)), "channels", 2)
        with pytest.raises(ConfigError, match="has 2 channels, but the ensemble has 1; serve it w"):
            start()
    monkeypatch.delenv(CANARY_VARIABLE)
    with pytest.raises(ConfigError, match="not set; `token2wav serve` sets it"):
        start()


def test_a_process_has_the_weights_and_the_pages_of_its_stage_alone(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """The cache of 1 MiB has room for less than the window of the flow."""
    start()
    load_stage = importlib.import_module("token2wav_server.ensemble.stage_model").load_stage
    window = {"left_blocks": 500, "max_hop_tokens": 5000}
    (tmp_path / "window.yaml").write_text(
        yaml.safe_dump({"stream": window, "runtime": {"device": "cpu", "cache_mib": 1}})
    )
    server = load_server_config(tmp_path / "window.yaml")
    with pytest.raises(ConfigError, match="500 past blocks and a chunk of 5000 tokens need"):
        load_stage(TINY, server, "flow")
    assert load_stage(TINY, server, "vocoder")
    folder = shutil.copytree(TINY, tmp_path / "model")
    next(folder.glob("flow.*")).unlink()
    assert load_stage(folder, ServerConfig(), "vocoder")
    with pytest.raises(CheckpointError, match="flow"):
        load_stage(folder, ServerConfig(), "flow")
