"""Entry point of the first stage of the ensemble, which cuts tokens into chunks."""

from __future__ import annotations

from typing import Any

from token2wav_server.ensemble.accumulator import Accumulator
from token2wav_server.model_process import read_environment


class TritonPythonModel:
    """Decoupled model of Triton's Python backend; threads of the service answer requests later."""

    def initialize(self, args: dict[str, str]) -> None:
        self._accumulator = Accumulator(args["model_name"], *read_environment())

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._accumulator.handle(request)

    def finalize(self) -> None:
        self._accumulator.close()
