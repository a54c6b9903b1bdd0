"""Service of the one-process model, with stand-ins for Triton's objects of a Python backend."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from testkit.models.tiny_model import WAIT_SECONDS, FaultyVocoder, demo_tokens
from testkit.patience import until
from token2wav import Token2Wav, Voice
from token2wav.cache.block_pool import OutOfBlocksError
from token2wav.config import ServerConfig
from token2wav.errors import (
    BackendError,
    DeviceLostError,
    ExpiredError,
    IdleError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
)
from token2wav.serving.audio_output import AudioChunk
from token2wav.voice import FIELDS

IMPORTED = [
    f"token2wav_server.{name}" for name in ("triton_request", "triton_reply", "triton_service")
]


class FakeTriton(SimpleNamespace):
    """Stand-in for `triton_python_backend_utils`."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

    def __init__(self) -> None:
        class Error(str):
            INVALID_ARG, NOT_FOUND, UNAVAILABLE, INTERNAL = (
                "INVALID_ARG",
                "NOT_FOUND",
                "UNAVAILABLE",
                "INTERNAL",
            )

            def __new__(cls, message: str, status: str) -> Error:
                return super().__new__(cls, f"{status} {message}")

        self.TritonError = Error

    @staticmethod
    def InferenceResponse(tensors: object = None, error: str | None = None) -> str | None:
        return error

    class Tensor:
        @staticmethod
        def from_dlpack(name: str, tensor: torch.Tensor) -> None:
            """Makes no tensor: nobody looks at it."""


class FakeRequest:
    """Request of a whole utterance, or of nothing without inputs; it is its own response sender.

    With a sequence id, it is the first request of an utterance.
    """

    def __init__(self, sequence_id: int = 0, **inputs: Any) -> None:
        self._sequence_id = sequence_id
        self._inputs = inputs
        self.errors: list[str | None] = []  # of all answers except the last, empty one
        self.over = False

    def inputs(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                name=partial(str, name), to_dlpack=torch.from_numpy(array.copy()).__dlpack__
            )
            for name, array in self._inputs.items()
        ]

    def correlation_id(self) -> int:
        return self._sequence_id

    def flags(self) -> int:
        return int(self._sequence_id > 0)  # sequence_start

    def parameters(self) -> str:
        return "{}"

    def get_response_sender(self) -> FakeRequest:
        return self

    def is_cancelled(self) -> bool:
        return False

    def send(self, *responses: str | None, flags: int = 0) -> None:
        assert not self.over, "an answer after the last word"
        self.errors += responses
        self.over = bool(flags)


def spoken(voice: Voice) -> FakeRequest:
    return FakeRequest(tokens=demo_tokens(4), **tensors_of(voice))


def tensors_of(voice: Voice) -> dict[str, Any]:
    return {name: getattr(voice, name) for name in FIELDS}


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTriton]:
    fake = FakeTriton()
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake)
    yield fake
    for name in IMPORTED:
        sys.modules.pop(name, None)


@pytest.fixture
def service(triton: FakeTriton, faulty: tuple[Token2Wav, FaultyVocoder]) -> Iterator[Any]:
    made = importlib.import_module("token2wav_server.triton_service").TritonService(
        faulty[0], ServerConfig()
    )
    yield made
    made.close()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("tokens", "none"), "INVALID_ARG"),
        (StreamClosedError("stream: gone"), "NOT_FOUND"),
        (IdleError("stream: idle"), "NOT_FOUND"),
        (ExpiredError("stream: old"), "NOT_FOUND"),
        (LimitError("streams: full"), "UNAVAILABLE"),
        (OutOfBlocksError("cache: full"), "UNAVAILABLE"),
        (BackendError("backend: broken"), "INTERNAL"),
        (DeviceLostError("backend: lost"), "INTERNAL"),
        (Token2WavError("something"), "INTERNAL"),
    ],
)
def test_status_of_an_error_holds_for_its_subclasses(
    triton: FakeTriton, error: Token2WavError, status: str
) -> None:
    request = FakeRequest()
    importlib.import_module("token2wav_server.triton_reply").TritonReply(request).fail(error)
    assert request.errors == [f"{status} {error}"]


def test_an_unexpected_failure_ends_its_request_alone(
    service: Any, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(service._service._requests.scheduler, "push", lambda *_, **__: [][0])
        service.handle(request := spoken(voice))
        until(lambda: request.over)
    assert request.errors == ["INTERNAL backend: IndexError: list index out of range"]
    registry = service._service._observer.registry
    assert registry.get_sample_value("token2wav_refused_total", {"what": "backend"}) == 1
    assert service._service._requests.open_requests == 0
    service.handle(request := spoken(voice))
    until(lambda: request.over)
    assert request.errors == [None]  # its audio


def test_a_reply_does_not_use_its_sender_after_the_end(triton: FakeTriton) -> None:
    """Tritonserver would crash."""

    class Sender(FakeRequest):
        def is_cancelled(self) -> bool:
            assert not self.over, "a question after the last word"
            return False

    request = Sender()
    reply = importlib.import_module("token2wav_server.triton_reply").TritonReply(request)
    chunk = AudioChunk(np.zeros(960, np.float32), 0, False, 24_000, 960, 0, 0, 1)
    reply.send(chunk)
    reply.fail(InputError("tokens", "none"))
    reply.send(chunk)
    reply.finish()
    assert not reply.is_cancelled()
    assert request.errors == [None, "INVALID_ARG tokens: none"]


def test_who_finishes_a_reply_does_not_wait_for_triton(triton: FakeTriton) -> None:
    acknowledged = threading.Event()

    class Slow(FakeRequest):
        def send(self, *responses: str | None, flags: int = 0) -> None:
            assert acknowledged.wait(30)
            super().send(*responses, flags=flags)

    request = Slow()
    with ThreadPoolExecutor(1) as finishers:
        reply_module = importlib.import_module("token2wav_server.triton_reply")
        reply_module.TritonReply(request, finishers).finish()
        assert not request.over
        acknowledged.set()
    assert request.over


def test_triton_waits_while_too_many_requests_are_unread(
    service: Any, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service._unread, "maxsize", 2)
    read, reading, handle = threading.Event(), threading.Event(), service._take

    def slow(*arguments: Any) -> None:
        reading.set()
        assert read.wait(WAIT_SECONDS)
        handle(*arguments)

    monkeypatch.setattr(service, "_take", slow)
    requests = [spoken(voice) for _ in range(4)]
    service.handle(requests[0])
    assert reading.wait(WAIT_SECONDS)
    for request in requests[1:3]:
        service.handle(request)
    with ThreadPoolExecutor(1) as triton:
        waiting = triton.submit(service.handle, requests[3])
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        read.set()
        waiting.result(WAIT_SECONDS)
    until(lambda: all(request.over for request in requests))
    assert [request.errors for request in requests] == 4 * [[None]]


def test_all_requests_are_answered_when_the_service_has_closed(service: Any, voice: Voice) -> None:
    inputs = {"tokens": demo_tokens(4), **tensors_of(voice)}
    requests = [FakeRequest(number, **inputs) for number in range(1, 20)]
    for request in requests:
        service.handle(request)
    service.close()
    assert all(request.over for request in requests)


def test_a_request_that_cannot_be_answered_harms_no_other(service: Any, voice: Voice) -> None:
    service.handle(object())
    service.handle(request := spoken(voice))
    until(lambda: request.over)
    assert request.errors == [None]


def test_a_refused_request_is_freed_at_once(service: Any) -> None:
    """A cycle of its error and its frame would keep its shared memory until Python looks for
    cycles.
    """
    request = FakeRequest()
    freed, errors = weakref.ref(request), request.errors
    gc.disable()
    try:
        service.handle(request)
        del request
        until(lambda: freed() is None)
        assert len(errors) == 1
    finally:
        gc.enable()
