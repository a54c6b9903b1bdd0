"""Entry point of the ensemble's third stage: Triton calls it, and it runs vocoder chunks in batches."""

from __future__ import annotations

from functools import partial
from typing import Any

from token2wav.serving.audio_output import AudioOutput
from token2wav_server.ensemble.settings import Settings
from token2wav_server.ensemble.stage_model import StageModel
from token2wav_server.ensemble.stages import VocoderStage
from token2wav_server.ensemble.wire import vocoder_part


class TritonPythonModel:
    """Decoupled Python-backend model; while it computes, Triton gathers the next batch."""

    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.read()
        output = partial(AudioOutput, settings.model_config(), trim_silence_ms=settings.server.stream.trim_silence_ms)
        stage = VocoderStage(settings.vocoder_engine(), output)
        self._model = StageModel(args["model_name"], stage, vocoder_part, settings.server.limits)

    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
