"""Noise layer of decoders."""

from __future__ import annotations

import torch

from token2wav.layers.convolutions import StreamConv
from token2wav.layers.streaming import (
    OFFLINE,
    ON_TIME,
    FreezableLayer,
    Streaming,
    StreamStep,
    Timing,
)

# Positions after which the noise repeats: 11 s at 24 kHz, longer in layers of lower rates.
_PERIOD = 1 << 18


def noise_table(seed: int) -> torch.Tensor:
    """Draws the noise (positions,) float32 of a layer, with unit variance."""
    # Drawn on the CPU, because generators of other devices draw other numbers.
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_PERIOD, generator=generator, device="cpu")


class PositionNoise(Streaming, FreezableLayer):
    """Noise with a strength that depends on the signal: x + noise * (W x). All channels of a
    position have the same noise value.

    The public code draws new noise in every call. Here a noise value depends on its position alone,
    so that a stream, a batch and a whole utterance get the same noise. The state is the position at
    which the next step starts.

    Layers of one network have different seeds.
    """

    table: torch.Tensor
    state_shape = (1,)

    def __init__(self, channels: int, *, seed: int) -> None:
        super().__init__()
        self.linear = StreamConv(channels, channels, 1, bias=False)
        self.seed = seed
        self.register_buffer("table", None, persistent=False)  # (positions,), filled by `freeze`

    def place(self, timing: Timing = ON_TIME) -> Timing:
        self.linear.place(timing)
        return super().place(timing)

    def freeze(self) -> None:
        self.table = noise_table(self.seed)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Adds noise to x (B, channels, T), except in streams that turn noise off."""
        positions = torch.arange(x.shape[2], device=x.device)
        if step.state is not None:
            start = x.new_zeros(x.shape[0], 1) if step.first else step.state[self]
            positions = positions + start.long() - self.input.delay
            if not step.frames_past_end:
                # The state is a remainder, because float32 skips integers above 2**24.
                step.save_state(self, torch.remainder(start + x.shape[2], _PERIOD))
        noise = self.table[torch.remainder(positions, _PERIOD)]  # (T,) or (B, T)
        if step.noise_factor is not None:
            noise = noise * step.noise_factor[:, None]
        return torch.addcmul(x, noise[..., None, :], self.linear(x, step))
