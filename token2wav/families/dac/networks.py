"""Family of DAC: its decoder, and its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.errors import CheckpointError
from token2wav.execution.family import Family
from token2wav.families.dac.network import Dac
from token2wav.families.dac.published import BOOK, converted, transformers_name
from token2wav.model_config import StageName
from token2wav.networks.weights import (
    fitting_weights,
    floating_tensors,
    read_state,
)

_PARTS = ("quantizer.", "decoder.")  # the rest makes codes
_ENCODING = re.compile(r"quantizer\.quantizers\.\d+\.in_proj\.\w+")  # only makes codes


class DacFamily(Family):
    """Family of DAC."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return Dac(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        state: Any = read_state(path)
        if "state_dict" in state:  # a file of `descript-audio-codec`
            state = state["state_dict"]
            if not isinstance(state, dict):
                raise CheckpointError(f"{path}: state_dict: expected weights by name")
        own = {
            name: value
            for name, value in state.items()
            if str(name).startswith(_PARTS) and not _ENCODING.match(str(name))
        }
        blocks = len(network.decoder.block)
        named = floating_tensors(own, path, lambda name: transformers_name(name, blocks))
        return fitting_weights(network, converted(named, BOOK, path), path)


FAMILY = DacFamily()
