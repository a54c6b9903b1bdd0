"""Family of NanoCodec: its weights, which may be in an archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from token2wav.config.model_config import StageName
from token2wav.families.codec_family import CodecFamily
from token2wav.families.nanocodec import NAMES
from token2wav.families.nanocodec.network import NanoCodec
from token2wav.networks.codec_weights import converted_weights
from token2wav.networks.weights import read_pickle
from token2wav.published.nemo_archive import WEIGHTS, read_member


class NanoCodecFamily(CodecFamily):
    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        if path.suffix != ".nemo":
            return super().weights(network, path, stage)
        state = read_pickle(read_member(path, WEIGHTS), path)
        wanted = {name: value for name, value in state.items() if str(name).startswith(NAMES.parts)}
        return converted_weights(network, wanted, path, NAMES)


FAMILY = NanoCodecFamily(NanoCodec, NAMES)
