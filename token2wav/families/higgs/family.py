"""Family of the Higgs Audio tokenizer v2: its decoder, and its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.family import Family
from token2wav.families.higgs.config import HiggsConfig
from token2wav.layers.codebooks import ProjectedCodebooks
from token2wav.layers.streaming import OFFLINE, StreamStep, WaveformNetwork
from token2wav.networks.codec_weights import converted, transformers_name
from token2wav.networks.symmetric_decoder import SymmetricDecoder
from token2wav.networks.weights import (
    fitting_weights,
    floating_tensors,
    read_state,
)

_QUANTIZER, _PROJECTION, _DECODER = "quantizer.quantizers.", "fc2.", "acoustic_decoder."
# Names in the `model.pth` of the first release
_FIRST_PROJECTION, _FIRST_DECODER = "fc_post2.", "decoder_2."
_FIRST_CODEBOOK = re.compile(
    r"quantizer\.vq\.layers\.(\d{1,3})\.(_codebook\.embed|project_out\.\w+)"
)
_PARTS = ("quantizer.", _PROJECTION, _DECODER, _FIRST_PROJECTION, _FIRST_DECODER)
_CODEBOOK = re.compile(
    r"quantizer\.quantizers\.\d{1,3}\.(codebook\.embed|project_out\.\w+)|"
    rf"{_FIRST_CODEBOOK.pattern}"
)
_BOOK = ("codebook.embed", "project_out.weight", "project_out.bias")


class Higgs(WaveformNetwork):
    """Decoder of the Higgs Audio tokenizer, from codes to audio. Modules have the names of the
    published weights.
    """

    input_dtype = torch.int32

    def __init__(self, config: HiggsConfig) -> None:
        super().__init__()
        sizes, width = config.sizes, config.sizes.quantizer_width
        self.input_channels, self.frame_samples = sizes.codebooks, config.samples_per_token
        self.quantizer = ProjectedCodebooks(
            self.input_channels, sizes.codebook_size, sizes.codebook_dim, width
        )
        self.fc2 = nn.Linear(width, sizes.decoder.latents)
        self.acoustic_decoder = SymmetricDecoder(sizes.decoder, whole_frames=True)
        self.output = self.acoustic_decoder.place()

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of codes (B, codebooks, T), which are -1 in
        codebooks that a stream does not send. The audio of a step is late by `output_delay`.
        """
        latents = self.fc2(self.quantizer(codes).transpose(1, 2)).transpose(1, 2)
        return self.acoustic_decoder(latents, step)


class HiggsFamily(Family):
    """Family of the Higgs Audio tokenizer v2."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return Higgs(config)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        # The other weights, most of the file, make codes. They stay in the file.
        blocks = len(network.acoustic_decoder.block)
        state = {
            name: value
            for name, value in read_state(path, _PARTS).items()
            if not name.startswith("quantizer.") or _CODEBOOK.fullmatch(name)
        }
        named = floating_tensors(state, path, lambda name: _current_name(name, blocks))
        return fitting_weights(network, converted(named, _BOOK, path), path)


def _current_name(name: str, blocks: int) -> str:
    """Returns the name of a weight in the format of `transformers`.

    Args:
        name: name in the `model.pth` of the first release.
        blocks: upsampling blocks of the decoder.
    """
    if name.startswith(_FIRST_DECODER):
        dac_name = f"decoder.{name.removeprefix(_FIRST_DECODER)}"
        return f"acoustic_{transformers_name(dac_name, blocks)}"
    if match := _FIRST_CODEBOOK.fullmatch(name):
        return f"{_QUANTIZER}{match[1]}.{match[2].removeprefix('_')}"
    return name.replace(_FIRST_PROJECTION, _PROJECTION)


FAMILY = HiggsFamily()
