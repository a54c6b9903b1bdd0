"""Family of SNAC: its decoder, and its weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.execution.family import Family
from token2wav.families.dac.network import Decoder
from token2wav.families.dac.published import BOOK, converted, decoder_name
from token2wav.families.snac.attention import LocalAttention
from token2wav.families.snac.config import SnacConfig, SnacSizes
from token2wav.model_config import StageName
from token2wav.networks.codebooks import ProjectedCodebooks
from token2wav.networks.streaming import OFFLINE, StreamStep, VocoderNetwork
from token2wav.networks.weights import (
    fitting_weights,
    floating_tensors,
    read_state,
)

_PARTS = ("quantizer.", "decoder.")  # the rest makes codes
_ENCODING = re.compile(r"quantizer\.quantizers\.\d+\.in_proj\..+")  # only makes codes


class Snac(VocoderNetwork):
    """Decoder of SNAC, from codes to audio.

    Args:
        config: configuration of the model.
    """

    places: torch.Tensor

    def __init__(self, config: SnacConfig) -> None:
        super().__init__()
        sizes = config.sizes
        self.bands, self.frame_samples = sizes.codes, config.samples_per_token
        self.quantizer = ProjectedCodebooks(
            len(sizes.vq_strides), sizes.codebook_size, sizes.codebook_dim, sizes.decoder.latents
        )
        self.decoder = Decoder(
            sizes.decoder,
            whole_frames=True,
            depthwise=sizes.depthwise,
            noise=sizes.noise,
            attention=_attention(sizes),
        )
        self.output_delay = self.decoder.output_delay
        self.window_frames = sizes.window_tokens
        self.frames_past_window = config.tokens_past_window
        self._places = sizes.code_places()
        self.register_buffer("places", None, persistent=False)  # filled by `freeze`

    def freeze(self) -> None:
        super().freeze()
        self.decoder.freeze()
        self.places = torch.tensor(self._places)  # (codebooks, latents of a token)

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio of codes (B, codes of a token, T), which are whole numbers in float32.

        Returns:
            (B, 1, frame_samples * T) audio of a step, late by `output_delay`.
        """
        spread = codes[:, self.places].transpose(2, 3).flatten(2)  # (B, codebooks, latents)
        return torch.tanh(self.decoder(self.quantizer(spread), step))


def _attention(sizes: SnacSizes) -> Callable[[int, int], LocalAttention] | None:
    """Returns the maker of the attention layer; None for a model without attention."""
    if (window := sizes.attn_window_size) is None:
        return None
    return lambda channels, delay: LocalAttention(
        channels, window, input_delay=delay, output_delay=sizes.latent_delay
    )


class SnacFamily(Family):
    """Family of SNAC."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return Snac(config)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        own = {
            name: value
            for name, value in read_state(path).items()
            if str(name).startswith(_PARTS) and not _ENCODING.fullmatch(str(name))
        }
        decoder = network.decoder
        first = ["conv1"] if decoder.conv0 is None else ["conv0", "conv1"]
        attention = [] if decoder.attention is None else ["attention"]
        layers = [*first, *attention, *["block"] * len(decoder.block), "snake1", "conv2"]
        noise = ["noise"] if decoder.block[0].noise is not None else []
        in_block = ["snake1", "conv_t1", *noise]
        named = floating_tensors(own, path, lambda name: decoder_name(name, layers, in_block))
        return fitting_weights(network, converted(named, BOOK, path), path)


FAMILY = SnacFamily()
