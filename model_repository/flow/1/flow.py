"""Entry point of the second stage of the ensemble, which computes mel for batches of chunks."""

from __future__ import annotations

from typing import Any

from token2wav_server.ensemble.stages import load_flow
from token2wav_server.ensemble.wire import StageModel, flow_part


class TritonPythonModel:
    """Decoupled model of Triton's Python backend.

    While it computes a batch, Triton collects the requests of the next batch.
    """

    def initialize(self, args: dict[str, str]) -> None:
        self._model = StageModel(args["model_name"], load_flow, flow_part)

    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
