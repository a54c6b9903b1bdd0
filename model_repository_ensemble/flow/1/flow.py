"""Entry point of the ensemble's second stage: Triton calls it, and it runs flow chunks in batches."""

from __future__ import annotations

from typing import Any

from token2wav_server.ensemble.settings import Settings
from token2wav_server.ensemble.stage_model import StageModel
from token2wav_server.ensemble.stages import FlowStage
from token2wav_server.ensemble.wire import flow_part


class TritonPythonModel:
    """Decoupled Python-backend model; while it computes, Triton gathers the next batch."""

    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.read()
        stage = FlowStage(settings.flow_engine(), settings.model_config().token_mel_ratio)
        self._model = StageModel(args["model_name"], stage, flow_part, settings.server.limits)

    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
