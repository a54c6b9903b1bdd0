"""Decoder of SNAC."""

from __future__ import annotations

import torch

from token2wav.families.snac import SnacSizes
from token2wav.families.snac.attention import LocalAttention
from token2wav.layers.codebooks import ProjectedCodebooks
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.symmetric_decoder import SymmetricDecoder, Variant
from token2wav.networks.waveform_network import WaveformNetwork


class Snac(WaveformNetwork):
    """Decoder of SNAC, from codes to audio."""

    input_dtype = torch.int32
    places: torch.Tensor

    def __init__(self, sizes: SnacSizes) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = sizes.codes, sizes.frame_samples
        self.quantizer = ProjectedCodebooks(
            len(sizes.vq_strides), sizes.codebook_size, sizes.codebook_dim, sizes.latents
        )
        attention, window, token = None, sizes.attn_window_size, sizes.token_latents
        if window is not None:
            attention = LocalAttention(sizes.decoder_hidden_size, window, token)
        variant = Variant(whole_frames=True, depthwise=sizes.depthwise, noise=sizes.noise)
        self.decoder = SymmetricDecoder(sizes, variant, attention)
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
        spread = codes[:, self.places].transpose(2, 3).flatten(2)  # (B, codebooks, latents)
        return torch.tanh(self.decoder(self.quantizer(spread), step))
