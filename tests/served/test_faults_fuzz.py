"""Malformed requests by the hundred, from a seed, while a well-behaved stream runs beside them
unharmed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from testkit.models.golden import GoldenSet
from testkit.rigs.server_rig import Connection, Rig, voice_inputs
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav import Token2Wav
from token2wav_client import Client, ClientVoice

REQUESTS = 150
IDS = (0, 1, 2**62, "a", "b", "", "a" * 300, "\u00e4\n")


@dataclass
class Fuzzer:
    """Makes requests of which few are right; every one is answered, or ends its gRPC stream.

    Attributes:
        errors: messages that came back.
    """

    golden: GoldenSet
    random: random.Random
    errors: list[str] = field(default_factory=list)

    def send(self, connection: Connection) -> None:
        choose = self.random.choice
        inputs: dict[str, Any] | None = choose([None, self._voice()])
        parameters = choose(
            [
                None,
                None,
                {"audio_format": choose(["mp3", 16, "int16", "alaw"])},
                {"sample_rate": choose([8000, 0, -(2**31), "8000", True])},
                {"keep_open": choose([1, ""])},
            ]
        )
        connection.send(
            self._tokens(),
            inputs,
            choose(IDS),
            start=choose([True, False]),
            end=choose([True, False]),
            parameters=parameters,
        )
        self.errors += connection.answers().errors

    def _tokens(self) -> np.ndarray[Any, Any]:
        numbers = np.random.default_rng(self.random.randrange(2**32))
        shape = self.random.choice([(0,), (1,), (7,), (40,), (1, 5), (2, 2, 2), ()])
        dtype = self.random.choice([np.int32] * 5 + [np.int64, np.float32, np.float64, np.uint8])
        low, high = self.random.choice([(0, 200)] * 3 + [(-5, 5), (-(2**31), 2**31 - 1)])
        with np.errstate(invalid="ignore"):
            return (
                numbers.integers(low, high, shape).astype(dtype) if shape else np.array([5], dtype)
            )

    def _voice(self) -> dict[str, Any]:
        inputs: dict[str, Any] = voice_inputs(self.golden.voice)
        spoil: list[Callable[[], object]] = [
            lambda: None,
            lambda: None,
            lambda: inputs.pop(self.random.choice(list(inputs))),
            lambda: inputs.update(prompt_mel=inputs["prompt_mel"][:-1]),
            lambda: inputs.update(prompt_mel=inputs["prompt_mel"].T.copy()),
            lambda: inputs.update(prompt_mel=np.full_like(inputs["prompt_mel"], np.inf)),
            lambda: inputs.update(prompt_tokens=inputs["prompt_tokens"].astype(np.float32)),
            lambda: inputs.update(prompt_tokens=-inputs["prompt_tokens"] - 1),
            lambda: inputs.update(speaker_embedding=np.zeros(192, np.float32)),
            lambda: inputs.update(speaker_embedding=np.full(192, np.nan, np.float32)),
            lambda: inputs.update(voice_id=np.zeros(self.random.choice([0, 31, 32]), np.uint8)),
        ]
        self.random.choice(spoil)()
        return inputs


@pytest.mark.parametrize("seed", [0, 1])
def test_malformed_requests(
    rig: Rig, golden: GoldenSet, model: Token2Wav, voice: ClientVoice, seed: int
) -> None:
    expected = model.synthesize(golden.tokens, golden.voice)
    wrong: list[float] = []
    over = threading.Event()

    def behave() -> None:
        with Client(rig.server.grpc_url) as client:
            while not over.is_set():
                audio = np.concatenate(
                    [chunk.audio for chunk in client.synthesize(golden.tokens[:, None], voice)]
                )
                wrong.append(float(np.abs(audio - expected).max()))

    fuzzer = Fuzzer(golden, random.Random(seed))
    neighbour = threading.Thread(target=behave)
    neighbour.start()
    try:
        with rig.connect() as connection:
            for _ in range(REQUESTS):
                fuzzer.send(connection)
    finally:
        over.set()
        neighbour.join()
    assert len(fuzzer.errors) > REQUESTS / 2
    assert len(set(fuzzer.errors)) > 10, "many ways to be wrong, each told in its own words"
    assert not any("Traceback" in error or "not healthy" in error for error in fuzzer.errors)
    assert wrong
    assert max(wrong) <= SERVER_EQUALS_LIBRARY
    for sequence in ("a", "b", 1, 2**62, "a" * 300, "\u00e4\n"):  # left open by the fuzzer
        with rig.connect() as connection:
            connection.send([-1], None, sequence)
            assert len(connection.answers().errors) == 1
