"""Section flows: time to the first audio of flows other than CosyVoice3, with default settings."""

from __future__ import annotations

import gc
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.first_audio import first_audio_key, first_packet
from benchmarks.gpu.settings import LeftOut, Row, Rows, Settings
from testkit.models.sized import TEMPLATE, public_configs
from token2wav import StreamConfig, Token2Wav, assembly
from token2wav.config.model_config import ModelConfig, StageName
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.published.registry import read_config

# Cache of a model: 73 of the largest pages, of which 16 streams and their voice need 51. A share of
# the free memory would leave no room for the next model, if this one is still in memory.
_CACHE_MIB = 8192


def flows(folder: Path, settings: Settings) -> Rows:
    """Measures making each model, and the first audio of batches of its streams.

    The models have their published sizes and random weights.
    """
    for name in settings.flows:
        flow = _Flow(name, settings)
        yield f"{name}: the model", flow.make
        for streams in settings.flow_streams:
            yield f"{name}: {first_audio_key(streams)}", partial(flow.first_audio, streams)


class _Flow:
    """Flow of the section. The first row that needs the model makes it. Then the model of the flow
    before is gone, and a model that fails costs the rows of its own flow only.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self._name, self._settings = name, settings
        self._model: Token2Wav | None = None
        self._failed = False

    def make(self) -> Row:
        if self._failed:
            raise LeftOut("the model was not made")
        self._failed = True
        gc.collect()
        if self._settings.on_gpu:
            torch.cuda.empty_cache()
        tiny = self._settings.size == "tiny"
        config = read_config(TEMPLATE.parent) if tiny else public_configs()[self._name]
        began = time.monotonic()
        self._model = _with_random_weights(config, self._settings)
        self._failed = False
        took_s = round(time.monotonic() - began, 1)
        return {"load_s": took_s, "graphs": self._model.summary.graphs.graphs}

    def first_audio(self, streams: int) -> Row:
        if self._model is None:  # or another process made it
            self.make()
        assert self._model is not None
        return first_packet(self._model, self._settings, streams)


def _with_random_weights(config: ModelConfig, settings: Settings) -> Token2Wav:
    def network(folder: Path, config: ModelConfig, stage: StageName) -> Any:
        network: Any = assembly.family_for(config).network(config, stage)
        if isinstance(network, WaveformNetwork):
            network.freeze()
        return network.eval().requires_grad_(False)

    stream = StreamConfig()
    runtime = settings.runtime(cache_mib=settings.cache_mib or _CACHE_MIB)
    with patch.object(assembly, "load_network", network):
        stages = assembly.assemble(Path("no folder"), config, stream, runtime)
    return Token2Wav(config, stages, stream, "random weights")
