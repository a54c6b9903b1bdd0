"""Triton's entry point of the ensemble's third stage."""

from __future__ import annotations

from functools import partial
from typing import Any

from token2wav_server.ensemble.settings import Settings
from token2wav_server.ensemble.stage_model import StageModel
from token2wav_server.ensemble.wire import vocoder_part
from token2wav_server.ensemble.works import VocoderWork


class TritonPythonModel:
    """A decoupled Python-backend model; while it computes, Triton gathers the next batch."""

    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.read()
        work = VocoderWork(settings.vocoder_engine())
        part = partial(vocoder_part, settings.model_config())
        self._model = StageModel(args["model_name"], work, part, settings.server.limits)

    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
