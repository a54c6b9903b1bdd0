"""HiFT of Chatterbox, which fades its utterances in."""

from __future__ import annotations

import torch

from token2wav.layers.streaming import OFFLINE, Streaming, StreamStep
from token2wav.networks.hift import Decode, HiFT
from token2wav.networks.sample_source import SampleSource
from token2wav.networks.source import Phase
from token2wav.published.sizes import HiFTConfig


class FadeIn(Streaming):
    """Fade-in of a stream, which hides the rest of the prompt: 20 ms of silence, then 20 ms of
    rising volume.

    Its state is the number of samples faded so far, because the first step of a stream may be
    shorter than the fade-in.
    """

    state_shape = (1,)
    gains: torch.Tensor

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        quiet = sample_rate // 50
        rising = (1 - torch.linspace(0, torch.pi, quiet).cos()) / 2
        # the last gain serves all later samples
        gains = torch.cat((torch.zeros(quiet), rising, torch.ones(1)))
        self.register_buffer("gains", gains, persistent=False)

    def forward(self, audio: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Fades the audio (B, samples) of a step in place."""
        most, start = len(self.gains) - 1, self.input.delay if step.first else 0
        begin = audio[:, start : start + most]
        # (B, 1) number of samples before this step
        offset = audio.new_zeros(1, 1) if step.state is None or step.first else step.state[self]
        positions = offset.long() + torch.arange(begin.shape[1], device=audio.device)
        begin *= self.gains[positions.clamp(max=most)]
        step.save_state(self, (offset + begin.shape[1]).clamp(max=most))
        return audio


class FadedHiFT(HiFT):
    """HiFT vocoder that fades utterances in."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__(config, SampleSource)
        self.fade_in = FadeIn(config.sampling_rate)
        self.output = self.fade_in.place(self.output)

    @property
    def fade_gains(self) -> torch.Tensor:
        return self.fade_in.gains

    def forward(
        self,
        mel: torch.Tensor,
        noise: torch.Tensor,
        step: StreamStep = OFFLINE,
        phase: Phase = "exact",
        decode: Decode | None = None,
    ) -> torch.Tensor:
        return self.fade_in(super().forward(mel, noise, step, phase, decode), step)
