"""Family of a codec: a network with the sizes of a configuration, and a table of the names of its
published weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.execution.captured_sizes import CAPTURED_WINDOW_FRAMES, CAPTURED_WINDOWS
from token2wav.families.family import Family, StageParts
from token2wav.networks.codec_weights import codec_weights
from token2wav.networks.waveform_network import WaveformNetwork, WindowNetwork
from token2wav.published.weight_names import WeightNames
from token2wav.stages.stage import Stage
from token2wav.stages.windows import WindowStage


class CodecFamily(Family):
    def __init__(self, network: Callable[[Any], nn.Module], names: WeightNames) -> None:
        self._network, self._names = network, names

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return self._network(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        return codec_weights(network, path, self._names)


class WindowCodecFamily(CodecFamily):
    """Family of a codec with a decoder that is not causal, and decodes windows of a stream. The
    network is a `WindowNetwork`, and the configuration a `WindowCodecConfig`.
    """

    torch_only = "windows (a decoder that is not causal)"

    def own_stage(self, parts: StageParts) -> Stage[Any] | None:
        windows, graphs = parts.config.windows, parts.graphs
        short = windows.longest <= CAPTURED_WINDOW_FRAMES
        rows = CAPTURED_WINDOWS if graphs and short else ()
        return WindowStage(parts.network, windows, rows=rows, graphs=graphs)


def codec_family(network: type[WaveformNetwork], names: WeightNames) -> CodecFamily:
    """Makes the family of a codec from the class of its network."""
    family = WindowCodecFamily if issubclass(network, WindowNetwork) else CodecFamily
    return family(network, names)
