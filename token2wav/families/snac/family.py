"""Family of SNAC: its decoder, and its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.family import Family
from token2wav.families.snac.attention import LocalAttention
from token2wav.families.snac.config import SnacSizes
from token2wav.layers.codebooks import ProjectedCodebooks
from token2wav.layers.streaming import OFFLINE, StreamStep, WaveformNetwork
from token2wav.networks.codec_weights import BOOK, converted, decoder_name
from token2wav.networks.symmetric_decoder import SymmetricDecoder
from token2wav.networks.weights import (
    fitting_weights,
    floating_tensors,
    read_state,
)

_PARTS = ("quantizer.", "decoder.")  # the rest makes codes
_ENCODING = re.compile(r"quantizer\.quantizers\.\d+\.in_proj\..+")  # only makes codes


class Snac(WaveformNetwork):
    """Decoder of SNAC, from codes to audio."""

    input_dtype = torch.int32
    places: torch.Tensor

    def __init__(self, sizes: SnacSizes) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = sizes.codes, sizes.token_samples
        self.quantizer = ProjectedCodebooks(
            len(sizes.vq_strides), sizes.codebook_size, sizes.codebook_dim, sizes.decoder.latents
        )
        attention, window, token = None, sizes.attn_window_size, sizes.vq_strides[0]
        if window is not None:
            attention = LocalAttention(sizes.decoder_dim, window, token)
        self.decoder = SymmetricDecoder(
            sizes.decoder,
            whole_frames=True,
            depthwise=sizes.depthwise,
            noise=sizes.noise,
            attention=attention,
        )
        self.output = self.decoder.place()
        if attention is not None:
            self.window_frames = sizes.window_tokens
            self.frames_past_window = attention.output.delay // token
        self._places = sizes.code_places()
        self.register_buffer("places", None, persistent=False)  # filled by `freeze`

    def freeze(self) -> None:
        super().freeze()
        self.places = torch.tensor(self._places)  # (codebooks, latents of a token)

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio of codes (B, codes of a token, T).

        Returns:
            (B, 1, frame_samples * T) audio of a step, late by `output_delay`.
        """
        spread = codes[:, self.places].transpose(2, 3).flatten(2)  # (B, codebooks, latents)
        return torch.tanh(self.decoder(self.quantizer(spread), step))


class SnacFamily(Family):
    """Family of SNAC."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return Snac(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        state = {
            name: value
            for name, value in read_state(path, _PARTS).items()
            if not _ENCODING.fullmatch(name)
        }
        decoder = network.decoder
        layers = [
            name
            for name, layer in decoder.named_children()
            for _ in (layer if name == "block" else (name,))
        ]
        in_block = [
            name for name, _ in decoder.block[0].named_children() if not name.startswith("res_unit")
        ]
        named = floating_tensors(state, path, lambda name: decoder_name(name, layers, in_block))
        return fitting_weights(network, converted(named, BOOK, path), path)


FAMILY = SnacFamily()
