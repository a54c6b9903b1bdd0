"""Front in Python, with stand-ins for Triton's objects and for the engine."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.fake_engine import FakeEngine
from testkit.triton import Request, triton_module
from token2wav_server.engine.frames import audio_frame

TOKENS = {"tokens": np.arange(5, dtype=np.int32)}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    # The path of a socket has at most 107 bytes, and pytest's folders have long names.
    with tempfile.TemporaryDirectory(prefix="front-") as folder:
        path = Path(folder) / "engine.sock"
        monkeypatch.setenv("TOKEN2WAV_ENGINE", str(path))
        engine = FakeEngine(path)
        yield engine
        engine.stop()


@pytest.fixture
def front(engine: FakeEngine) -> Iterator[Any]:
    with triton_module():
        module = importlib.import_module("token2wav_server.front.python_front")
        front = module.PythonFront("token2wav_0_0")
        yield front
        front.close()


def test_a_chunk_that_cannot_be_sent_ends_the_utterance(
    front: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Audio would be missing in the middle of a stream that seems complete."""
    request = Request(TOKENS)
    send = request.send

    def without_room(response: Any = None, flags: int = 0) -> None:
        if not flags:
            raise RuntimeError("Failed to increase the shared memory pool size")
        send(response, flags)

    monkeypatch.setattr(request, "send", without_room)
    front.execute([request])
    slot = engine.request().slot
    engine.send(audio_frame(slot, {"audio": np.zeros(9, np.float32)}))
    error = "INTERNAL response: Failed to increase the shared memory pool size"
    assert request.next() == (error, 1)
    assert engine.cancelled.get(timeout=PATIENCE_SECONDS)[0] == slot


def test_an_empty_input_whose_shape_the_engine_refuses(front: Any, engine: FakeEngine) -> None:
    """The engine would disconnect the front, and so end all utterances."""
    request = Request(TOKENS | {"prompt_mel": np.empty((0, 2**24 + 1), np.float32)})
    front.execute([request])
    assert request.next() == ("INVALID_ARG prompt_mel: its shape is too large", 1)
    front.execute([Request(TOKENS)])
    assert engine.request().inputs.keys() == TOKENS.keys()


def test_the_engine_hears_of_a_cancellation_after_the_request(
    front: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores the cancellation of a request that it does not have yet."""
    request = Request(TOKENS)
    request.gone = True
    inputs = request.inputs

    def slow_inputs() -> Any:
        time.sleep(0.3)  # several checks for cancellations
        assert engine.cancelled.empty()
        return inputs()

    monkeypatch.setattr(request, "inputs", slow_inputs)
    front.execute([request])
    slot = engine.request().slot
    assert engine.cancelled.get(timeout=PATIENCE_SECONDS)[0] == slot
