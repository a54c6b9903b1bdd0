"""Family of NanoCodec: its decoder, and its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.family import Family
from token2wav.families.nanocodec.archive import WEIGHTS, read_member
from token2wav.families.nanocodec.network import NanoCodec
from token2wav.networks.weights import (
    fitting_weights,
    floating_tensors,
    fold_weight_norm,
    read_pickle,
    read_state,
)

_PART = "audio_decoder."  # the other weights make codes
# Wrappers in published names of weights that the network does not have.
_WRAPPERS = {".conv.": ".", ".activation.snake_act.": "."}


class NanoCodecFamily(Family):
    """Family of NanoCodec."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return NanoCodec(config.sizes.decoder, config.sizes.quantizer)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        if path.suffix == ".nemo":
            state = read_pickle(read_member(path, WEIGHTS), path)
            state = {name: value for name, value in state.items() if str(name).startswith(_PART)}
        else:
            state = read_state(path, (_PART,))
        weights = fold_weight_norm(floating_tensors(state, path, _short_name), path)
        return fitting_weights(network, weights, path)


def _short_name(name: str) -> str:
    name = name.removeprefix(_PART)
    for wrapper, short in _WRAPPERS.items():
        name = name.replace(wrapper, short)
    return name


FAMILY = NanoCodecFamily()
