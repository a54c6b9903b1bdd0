"""Attention of SNAC at 32 and 44.1 kHz: every latent attends to the latents of its own window."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.families.snac import HEAD_CHANNELS
from token2wav.layers.streaming import OFFLINE, ON_TIME, Streaming, StreamStep, Timing
from token2wav.layers.window_attention import rotate


class Rotary(nn.Module):
    """Angular frequencies of the rotary embeddings, which the published files contain."""

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = nn.Parameter(torch.empty(HEAD_CHANNELS // 2))

    def forward(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cosines and sines (1, count, HEAD_CHANNELS) of the first positions."""
        positions = torch.arange(count, device=self.inv_freq.device)
        angles = (positions[:, None] * self.inv_freq).repeat(1, 2)[None]
        return angles.cos(), angles.sin()


class LocalAttention(Streaming):
    """Attention within windows that do not overlap. Its result is added to its input.

    A window needs its last latent before its first output. So a step ends where a window is
    complete: after the end of a window, by the delay of the output, because the input is late. A
    step has whole tokens, so the output is late by whole tokens. Only the step that ends a stream
    may end anywhere. Its last window has only the latents that there are. The state is the input
    after the last complete window.

    Args:
        channels: channels of the signal, a multiple of `HEAD_CHANNELS`.
        window: latents in a window.
        token: latents of a token.
    """

    def __init__(self, channels: int, window: int, token: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.rel_pos = Rotary()
        self.to_qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.to_out = nn.Linear(channels, channels, bias=False)
        self.channels, self.heads = channels, channels // HEAD_CHANNELS
        self.window, self.token = window, token

    def place(self, timing: Timing = ON_TIME) -> Timing:
        delay = math.ceil(timing.delay / self.token) * self.token
        self.input, self.output = timing, Timing(delay, timing.extra)
        reach = delay - timing.delay
        self.state_shape = (self.channels, reach) if reach else ()
        return self.output

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes x (B, channels, T) and its attention, late by `output.delay` latents.

        Raises:
            ValueError: the step ends inside a window, but not the stream.
        """
        count = x.shape[2]
        if step.state is None:
            return self._attended(x)
        # Position 0 is the start of a window, or lies `delay` before the start of a stream.
        joined, delay = step.with_context(self, x), self.output.delay
        start, stop = delay if step.first else 0, count
        if step.frames_past_end:
            stop = count * (step.frames - step.frames_past_end) // step.frames + delay
        elif not torch.compiler.is_exporting() and (stop - start) % self.window:
            raise ValueError(f"step of {count} latents: it ends inside a window of {self.window}")
        out = self._attended(joined[:, :, start:stop])
        return F.pad(out, (start, count - stop)) if step.first or step.frames_past_end else out

    def _attended(self, x: torch.Tensor) -> torch.Tensor:
        """Computes x (B, channels, T) and its attention. Windows are counted from position 0."""
        # A graph has whole windows only. It must not depend on a remainder, which is no free size.
        missing = 0 if torch.compiler.is_exporting() else -x.shape[2] % self.window
        padded = F.pad(x, (0, missing)) if missing else x
        # (B, windows, window, channels)
        windows = padded.unfold(2, self.window, self.window).permute(0, 2, 3, 1)
        qkv = self.to_qkv(self.norm(windows)).unflatten(3, (3, self.heads, HEAD_CHANNELS))
        q, k, v = qkv.flatten(0, 1).unbind(2)  # (B * windows, window, heads, HEAD_CHANNELS)
        angles = self.rel_pos(self.window)
        mask = None
        if missing:
            present = torch.arange(padded.shape[2], device=x.device) < x.shape[2]
            mask = present.view(-1, 1, 1, self.window).repeat(len(x), 1, 1, 1)
        attended = F.scaled_dot_product_attention(
            rotate(q, angles).transpose(1, 2),
            rotate(k, angles).transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
        )
        out = windows + self.to_out(attended.transpose(1, 2).flatten(2)).view(windows.shape)
        out = out.flatten(1, 2).transpose(1, 2)
        return out[:, :, : x.shape[2]] if missing else out
