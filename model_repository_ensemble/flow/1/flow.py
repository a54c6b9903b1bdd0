"""Triton's entry point of the ensemble's second stage."""

from __future__ import annotations

from typing import Any

from token2wav_server.ensemble.settings import Settings
from token2wav_server.ensemble.stage_model import StageModel
from token2wav_server.ensemble.wire import flow_part
from token2wav_server.ensemble.works import FlowWork


class TritonPythonModel:
    """A decoupled Python-backend model; while it computes, Triton gathers the next batch."""

    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.read()
        work = FlowWork(settings.flow_engine(), settings.model_config().flow.token_mel_ratio)
        self._model = StageModel(args["model_name"], work, flow_part, settings.server.limits)

    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
