"""Settings of the ensemble's stages: they read the model folder and the configuration that the environment names."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from token2wav.config import ServerConfig, load_server_config
from token2wav.errors import ConfigError
from token2wav.execution.stages import FlowStage, VocoderStage
from token2wav.families import read_config
from token2wav.model import Token2Wav
from token2wav.model_config import ModelConfig
from token2wav_server.model_process import told_if_slow


@dataclass(frozen=True)
class Settings:
    """Settings that all three stages share.

    Attributes:
        folder: model folder, from TOKEN2WAV_MODEL.
        server: configuration in the file TOKEN2WAV_CONFIG, or the defaults.
    """

    folder: Path
    server: ServerConfig

    @classmethod
    def read(cls) -> Settings:
        """Reads the environment.

        Raises:
            ConfigError: there is no folder, or the file cannot be used.
        """
        folder = os.environ.get("TOKEN2WAV_MODEL")
        if not folder:
            raise ConfigError("TOKEN2WAV_MODEL: not set; it names the CosyVoice3 model folder to serve")
        file = os.environ.get("TOKEN2WAV_CONFIG")
        return cls(Path(folder), load_server_config(Path(file) if file else None))

    def model_config(self) -> ModelConfig:
        config = read_config(self.folder)
        config.check(self.server.stream)
        return config

    def flow_engine(self) -> FlowStage:
        return self._load(self.server).pipeline.flow

    def vocoder_engine(self) -> VocoderStage:
        """Loads the vocoder, next to a flow whose cache has the smallest size there is and which is dropped at once."""
        return self._load(replace(self.server, runtime=replace(self.server.runtime, cache_mib=1))).pipeline.vocoder

    def _load(self, server: ServerConfig) -> Token2Wav:
        """Loads the model on half of the threads, because flow and vocoder work at the same time, in a process each."""
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
        with told_if_slow():
            return Token2Wav.load(self.folder, stream=server.stream, runtime=server.runtime)
