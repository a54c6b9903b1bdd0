"""Networks from frames to audio: the base of vocoders and codec decoders."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from token2wav.config.windows import Windows
from token2wav.layers.streaming import ON_TIME, FreezableLayer, StreamStep, Timing


class WaveformNetwork(nn.Module):
    """Network from frames to audio. The frames of a vocoder are mel frames. The frames of a codec
    decoder are codes or latents.

    The method `forward` computes the audio (B, 1, frame_samples * T), late by `output_delay`, of
    the next frames (B, input_channels, T) of streams. Codes are -1 in codebooks that a stream does
    not send. A whole sequence has `missing_samples` less.

    Attributes:
        input_channels: mel bands, codebooks, or the size of a latent.
        input_dtype: dtype of the frames: int32 for codes.
        output: audio timing.
        window_frames, frames_past_window: every step that does not end a stream must end
            `frames_past_window` frames after a multiple of `window_frames` frames.
        m_source: harmonic source (`HarmonicSource`); only in networks that take noise.
        packs_linears: whether a decoder may have its linear layers packed. False if other code
            reads their weights.
    """

    input_channels: int
    input_dtype: torch.dtype = torch.float32
    frame_samples: int
    output: Timing
    window_frames: int = 1
    frames_past_window: int = 0
    m_source: Any
    packs_linears: bool = True

    def check_attributes(self) -> None:
        """Raises RuntimeError if the constructor did not set an attribute without a default."""
        for name in ("input_channels", "frame_samples", "output"):
            if not hasattr(self, name):
                raise RuntimeError(
                    f"{type(self).__name__}: the constructor of the network must set `{name}`"
                )

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def output_delay(self) -> int:
        """Delay of the audio of a step in samples, because the network reads later frames."""
        return self.output.delay

    @property
    def missing_samples(self) -> int:
        """Samples at the start of an utterance that the network does not make. They add to the
        delay of the audio of a step.
        """
        return -self.output.extra

    @property
    def lookahead_frames(self) -> int:
        """Frames at the end of an unfinished stream that yield no audio yet, rounded up."""
        return -(-(self.output_delay - self.missing_samples) // self.frame_samples)

    @property
    def first_frames(self) -> int:
        """Least frames with which a stream can start."""
        return self.output_delay // self.frame_samples + 1

    def no_frames(self) -> torch.Tensor:
        """Returns frames (input_channels, 0)."""
        return torch.empty(self.input_channels, 0, dtype=self.input_dtype, device=self.device)

    def freeze(self) -> None:
        """Ends loading: computes results that depend on the weights alone."""
        self.eval().requires_grad_(False)
        for module in self.modules():  # a layer before the layers inside it
            if isinstance(module, FreezableLayer):
                module.freeze()

    def vocode(self, frames: torch.Tensor, noise: Any, *, phase: Any = "exact") -> torch.Tensor:
        """Computes the audio (B, samples) of whole utterances from frames (B, input_channels, T).

        Only a network with a harmonic source uses `noise` and `phase`, see `HiFT`.
        """
        return self(frames)[:, 0]

    def run_step(
        self, frames: torch.Tensor, noise: torch.Tensor, step: StreamStep, decode: Any = None
    ) -> torch.Tensor:
        """Computes the audio (B, samples), late by `output_delay`, of the next frames (B,
        input_channels, T) of streams. `decode` runs the network on another backend; None for torch.
        """
        return (decode or self)(frames, step)[:, 0]


class WindowNetwork(WaveformNetwork):
    """Decoder that reads a whole utterance at once. It has no state, and decodes windows of a
    stream (`stages/windows.py`).
    """

    whole: Windows  # of a whole utterance
    output: Timing = ON_TIME

    @abstractmethod
    def forward(self, frames: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of frames (B, input_channels, T).
        `positions` (B,) int64 has the position of the first frame of each window.
        """

    def vocode(self, frames: torch.Tensor, noise: Any, *, phase: Any = "exact") -> torch.Tensor:
        count, samples = frames.shape[2], self.frame_samples
        parts = []
        for window in self.whole.over(0, count, count):
            positions = torch.full((len(frames),), window.position, device=self.device)
            audio = self(frames[:, :, window.first : window.last], positions)[:, 0]
            parts.append(audio[:, : (window.stop - window.start) * samples])
        return torch.cat(parts, dim=1)
