"""Triton's entry point of the ensemble's first stage."""

from __future__ import annotations

from typing import Any

from token2wav_server.ensemble.accumulator import Accumulator
from token2wav_server.ensemble.settings import Settings
from token2wav_server.gate import Gate


class TritonPythonModel:
    """A decoupled Python-backend model; it answers at once."""

    def initialize(self, args: dict[str, str]) -> None:
        self._gate = Gate()
        self._accumulator = Accumulator(Settings.read())

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            if self._gate.admits(request):
                self._accumulator.handle(request)

    def finalize(self) -> None:
        self._accumulator.close()
