"""Accumulator with stages that the tests play: they receive chunks, and report their results."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from testkit.batches import WHOLE_BLOCKS
from testkit.models.cosyvoice2_model import write_yaml
from testkit.models.family_golden import FamilyGolden
from testkit.models.tiny_model import TINY, demo_tokens, demo_voice
from testkit.models.yaml_edits import edit_text
from testkit.patience import PATIENCE_SECONDS
from testkit.triton import FakeTriton
from token2wav.config import ServerConfig, StreamConfig
from token2wav.config.token_format import NO_TOKEN
from token2wav.serving.audio_output import AudioChunk, AudioFormat
from token2wav_server.ensemble.links import Mailbox, send
from token2wav_server.ensemble.stage_streams import LONGEST_PASSAGE_S
from token2wav_server.model_process import ENGINE_VARIABLE

FINAL = FakeTriton.TRITONSERVER_RESPONSE_COMPLETE_FINAL
START, END = 1, 2
MODULES = [
    f"token2wav_server.{name}"
    for name in (
        "triton_tensors",
        "triton_reply",
        "ensemble.wire",
        "ensemble.accumulator",
    )
]


class Sender:
    """Response sender of one request. `responses` has the response and the flags of each call."""

    def __init__(self) -> None:
        self.responses: Queue[tuple[Any, int]] = Queue()

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.responses.put((response, flags))

    def next(self) -> tuple[Any, int]:
        return self.responses.get(timeout=PATIENCE_SECONDS)


class Stages:
    """Accumulator of the tiny model, and the mailboxes of its stages.

    Attributes:
        closed: ids of streams that the accumulator has closed, once for each stage.
    """

    def __init__(self, accumulator: Any) -> None:
        self._accumulator = accumulator
        self.closed: Queue[list[int]] = Queue()
        self._mailboxes = [Mailbox(name, self.closed.put) for name in ("flow", "vocoder")]

    def send(
        self,
        tokens: np.ndarray[Any, Any],
        flags: int,
        sequence_id: int = 7,
        **parameters: Any,
    ) -> Sender:
        """Sends tokens of an utterance to the accumulator."""
        sender = Sender()
        voice = vars(demo_voice(0)) if flags & START else {}
        inputs = [_Tensor(name, array) for name, array in {"tokens": tokens, **voice}.items()]
        request = SimpleNamespace(
            inputs=lambda: inputs,
            correlation_id=lambda: sequence_id,
            flags=lambda: flags,
            parameters=lambda: json.dumps(parameters),
            get_response_sender=lambda: sender,
        )
        self._accumulator.execute([request])
        return sender

    def close(self) -> None:
        self._accumulator.close()
        for mailbox in self._mailboxes:
            mailbox.close()


class _Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._name, self._array = name, array.copy()

    def name(self) -> str:
        return self._name

    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stages]]:
    """Starts the accumulator with a stand-in for Triton's module."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakeTriton())
    monkeypatch.setenv(ENGINE_VARIABLE, str(tmp_path / "engine.sock"))
    started: list[Stages] = []

    def start(folder: Path = TINY, stream: StreamConfig = WHOLE_BLOCKS) -> Stages:
        module = importlib.import_module("token2wav_server.ensemble.accumulator")
        server = ServerConfig(stream=stream)
        started.append(Stages(module.Accumulator("token_accumulator", folder, server)))
        return started[0]

    yield start
    for stages in started:
        stages.close()
    for name in MODULES:
        sys.modules.pop(name, None)


def chunk_of(response: Any) -> tuple[int, int, bool, bool]:
    """Returns stream id, index, last mark and whether there is a voice, of a chunk for the flow."""
    [[stream, index, last, *_]], [[*_, has_voice]] = (
        response[name].tolist() for name in ("label", "chunk")
    )
    return stream, index, bool(last), bool(has_voice)


def as_request(reader: str, tensors: dict[str, Any], sender: Sender) -> Any:
    """Reads the response of a model as the request of the next one."""
    inputs = [_Tensor(name, array) for name, array in tensors.items()]
    request = SimpleNamespace(inputs=lambda: inputs, get_response_sender=lambda: sender)
    wire = importlib.import_module("token2wav_server.ensemble.wire")
    return getattr(wire, reader)(request)


def test_a_chunk_is_sent_when_the_one_before_it_was_reported(start: Callable[..., Stages]) -> None:
    stages = start()
    sender = stages.send(demo_tokens(80), START | END)
    response, flags = sender.next()
    stream, *facts = chunk_of(response)
    assert (facts, flags) == ([0, False, True], 0)
    send("token_accumulator", {"stream": stream + 1})  # a stream that is over
    assert sender.responses.empty()
    send("token_accumulator", {"stream": stream, "audio": [24_000, 24_000, None]})
    response, flags = sender.next()
    assert (chunk_of(response), flags) == ((stream, 1, False, False), 0)
    send("token_accumulator", {"stream": stream})  # no audio yet
    response, flags = sender.next()
    assert (chunk_of(response), flags) == ((stream, 2, True, False), 0)
    assert stages.closed.empty()
    send("token_accumulator", {"stream": stream, "audio": [100, 24_000, None]})
    assert sender.next() == (None, FINAL)
    for _ in range(2):
        assert stages.closed.get(timeout=PATIENCE_SECONDS) == [stream]


def test_an_end_without_audio_reaches_the_client(start: Callable[..., Stages]) -> None:
    """Audio that is silent from start to end is trimmed, so its only chunk is empty."""
    stages, client = start(), Sender()
    sender = stages.send(demo_tokens(1), START | END)
    response, _ = sender.next()
    mel = {"label": response["label"], "mel": np.zeros((1, 2, 80), np.float32)}
    as_request("vocoder_part", mel, client).answer(
        AudioChunk(np.zeros(0, np.float32), 0, True, 24_000, 960, 960)
    )
    answer, flags = client.next()
    assert (answer["audio"].shape, answer["samples_trimmed"].tolist(), flags) == (
        (0,),
        [960],
        FINAL,
    )
    assert sender.next() == (None, FINAL)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        ([0, "backend: NaN"], "INTERNAL backend: NaN"),
        ([1, "cache: full"], "UNAVAILABLE cache: full"),
    ],
)
def test_an_error_of_a_stage_ends_the_stream_in_all_stages(
    start: Callable[..., Stages], error: list[Any], answer: str
) -> None:
    stages = start()
    sender = stages.send(demo_tokens(80), START)
    response, _ = sender.next()
    stream, *_ = chunk_of(response)
    send("token_accumulator", {"stream": stream, "error": error})
    assert sender.next() == (answer, FINAL)
    for _ in range(2):
        assert stages.closed.get(timeout=PATIENCE_SECONDS) == [stream]
    response, flags = stages.send(demo_tokens(1), END).next()
    assert flags == FINAL
    assert "stream: it failed" in response


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_chunk_that_triton_drops_frees_its_stream(
    start: Callable[..., Stages], monkeypatch: pytest.MonkeyPatch, overtaken: bool
) -> None:
    """Its client has left. The accumulator sees it when both stages were idle in turn, or when a
    chunk that was sent much later is reported.
    """
    stages = start()
    lost = stages.send(demo_tokens(80), START)
    lost.next()
    now = time.monotonic
    monkeypatch.setattr("time.monotonic", lambda: now() + LONGEST_PASSAGE_S + 1)
    if overtaken:
        response, _ = stages.send(demo_tokens(80), START | END, sequence_id=8).next()
        send("token_accumulator", {"stream": chunk_of(response)[0]})
    else:
        began = now()
        # The flow was not idle since the chunk was sent; then the vocoder was, before the flow.
        for flow, vocoder in ((began - 60, began), (began + 60, began + 59)):
            send("token_accumulator", {"stage": "flow", "idle_since": flow})
            send("token_accumulator", {"stage": "vocoder", "idle_since": vocoder})
        with pytest.raises(Empty):
            lost.responses.get(timeout=0.2)
        send("token_accumulator", {"stage": "vocoder", "idle_since": began + 61})
    assert lost.next() == ("NOT_FOUND stream: its client has left", FINAL)


@pytest.mark.parametrize(("block_tokens", "hop"), [(0, 25), (10, 20)])
def test_a_chunk_ends_with_a_block_of_the_settings(
    start: Callable[..., Stages], tmp_path: Path, block_tokens: int, hop: int
) -> None:
    path = write_yaml(tmp_path / "model", FamilyGolden("cosyvoice2", "tiny"))
    edit_text(path, ("macaron", "use_dynamic_chunk: True\n        macaron"))
    stages = start(path.parent, replace(WHOLE_BLOCKS, block_tokens=block_tokens))
    response, _ = stages.send(demo_tokens(80), START).next()
    [[begin, end, *_]] = response["chunk"].tolist()
    assert (begin, end) == (0, hop)


def test_the_flow_gets_the_chunk_and_the_options_of_the_request(
    start: Callable[..., Stages],
) -> None:
    """The first chunk is provisional, so the second one repeats its tokens."""
    stages, tokens = start(stream=StreamConfig(steps=(10, 3))), demo_tokens(80)
    options: dict[str, Any] = {"steps": 3, "audio_format": "mulaw", "sample_rate": 8000}
    sender, parts = stages.send(tokens[:11], START, **options), []
    for _ in range(2):
        response, _ = sender.next()
        parts.append(as_request("flow_part", response, Sender()))
        send("token_accumulator", {"stream": parts[-1].label.stream_id, "audio": [1, 8000, None]})
        if len(parts) == 1:
            assert sender.next() == (None, FINAL)
            sender = stages.send(tokens[11:], END)
    for index, part in enumerate(parts):
        assert (part.label.index, part.content.steps) == (index, 3)
        assert part.label.audio_format == AudioFormat("mulaw", 8000)
    first, second = (part.content for part in parts)
    assert first.voice.content_hash == demo_voice(0).content_hash
    assert second.voice is None
    early, block = first.chunk, second.chunk
    assert (early.start, early.stop, early.skip, early.provisional) == (0, 9, 0, True)
    assert early.tokens.tolist() == [*tokens[:11], NO_TOKEN]
    assert (block.start, block.stop, block.skip, block.provisional) == (0, 25, 9, False)
    assert block.tokens.tolist() == tokens[:28].tolist()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"speed": 2}, "speed: only 1 is possible in the ensemble; use the model token2wav"),
        ({"end_after_repeats": 5}, "end_after_repeats: the ensemble cannot end a stream"),
        ({"end_after_silence_s": 2.5}, "end_after_silence_s: the ensemble cannot end a stream"),
    ],
)
def test_options_that_the_ensemble_lacks_are_refused(
    start: Callable[..., Stages], parameters: dict[str, Any], message: str
) -> None:
    answer, flags = start().send(demo_tokens(80), START | END, **parameters).next()
    assert flags == FINAL
    assert answer.startswith(f"INVALID_ARG {message}")
