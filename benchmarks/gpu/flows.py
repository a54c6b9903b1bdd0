"""Section flows: time to the first audio of flows other than CosyVoice3, with default settings."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.first_audio import first_audio_key, first_packet
from benchmarks.gpu.settings import Rows, Settings
from testkit.models.sized import TEMPLATE, public_configs
from token2wav import StreamConfig, Token2Wav, assembly
from token2wav.config.model_config import ModelConfig, StageName
from token2wav.layers.streaming import WaveformNetwork
from token2wav.published.registry import read_config


def flows(folder: Path, settings: Settings) -> Rows:
    """Measures making each model, and the first audio of batches of its streams.

    The models have their published sizes and random weights.
    """
    for name in settings.flows:
        tiny = settings.size == "tiny"
        config = read_config(TEMPLATE.parent) if tiny else public_configs()[name]
        began = time.monotonic()
        model = _with_random_weights(config, settings)
        graphs = model.summary.graphs
        loaded = {"load_s": round(time.monotonic() - began, 1), "graphs": graphs.graphs}
        yield f"{name}: the model", lambda loaded=loaded: loaded  # type: ignore[misc]
        for streams in settings.flow_streams:
            key = f"{name}: {first_audio_key(streams)}"
            yield key, partial(first_packet, model, settings, streams)


def _with_random_weights(config: ModelConfig, settings: Settings) -> Token2Wav:
    def network(folder: Path, config: ModelConfig, stage: StageName) -> Any:
        network: Any = assembly.family_for(config).network(config, stage)
        if isinstance(network, WaveformNetwork):
            network.freeze()
        return network.eval().requires_grad_(False)

    stream = StreamConfig()
    with patch.object(assembly, "load_network", network):
        stages = assembly.assemble(Path("no folder"), config, stream, settings.runtime())
    return Token2Wav(config, stages, stream, "random weights")
