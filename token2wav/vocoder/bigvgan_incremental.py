"""BigVGAN on a mel that grows: every call costs only the new frames and the reach of the network to both sides.

Every sample depends on a bounded stretch of mel and on nothing else. So a window that starts far enough before the
first new sample, or at the start of the utterance, and ends far enough after the last one, or at its end, gives the
same samples as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from token2wav.vocoder.bigvgan import BigVGAN
from token2wav.vocoder.bigvgan_reach import reach_frames
from token2wav.vocoder.windows import run_together

BigVGANNetwork = Callable[[torch.Tensor], torch.Tensor]  # as `BigVGAN.forward`


@dataclass(eq=False)
class BigVGANState:
    """One utterance. Frames count from its start.

    Attributes:
        mel: (bands, n) frames from `mel_start` on: those that samples to come depend on.
        mel_start: first frame that is kept.
        sent: frames whose samples were sent.
    """

    mel: torch.Tensor
    mel_start: int = 0
    sent: int = 0


class IncrementalBigVGAN:
    """Vocodes utterances piece by piece. It has no state of its own.

    Args:
        bigvgan: the vocoder.
        network: runs `BigVGAN.forward` on another engine than torch.
    """

    def __init__(self, bigvgan: BigVGAN, network: BigVGANNetwork | None = None) -> None:
        self._bigvgan = bigvgan
        self._network = network or bigvgan
        self._reach = reach_frames(bigvgan.config)
        self._samples = bigvgan.config.hop_size

    @property
    def lookahead_frames(self) -> int:
        """Mel frames at the end of an unfinished mel that yield no audio yet."""
        return self._reach.right

    def start(self) -> BigVGANState:
        return BigVGANState(torch.empty(self._bigvgan.config.num_mels, 0, device=self._bigvgan.device))

    @torch.inference_mode()
    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        """Audio of a whole mel (bands, frames) at once, (samples,)."""
        return self._bigvgan(mel[None])[0, 0]

    @torch.inference_mode()
    def advance_batch(self, batch: Sequence[tuple[BigVGANState, torch.Tensor, bool]]) -> list[torch.Tensor]:
        """Takes (state, mel, final) of several utterances and returns the new samples of each.

        `mel` (bands, n) are the next frames; the last `lookahead_frames` of an utterance are held back until `final`.
        """
        results = [mel.new_empty(0) for _, mel, _ in batch]
        windows = {
            index: window
            for index, (state, mel, final) in enumerate(batch)
            if (window := self._window(state, mel, final)) is not None
        }
        rows = run_together(self._network, [(mel,) for mel, _ in windows.values()])
        for (index, (_, new)), audio in zip(windows.items(), rows, strict=True):
            results[index] = audio[0, new]
        return results

    def _window(self, state: BigVGANState, mel: torch.Tensor, final: bool) -> tuple[torch.Tensor, slice] | None:
        """Mel (1, bands, n) for the samples that new frames make possible, and which they are; None if there are none.

        The frames are taken as sent.
        """
        state.mel = torch.cat((state.mel, mel), dim=1)
        frames = state.mel_start + state.mel.shape[1]
        ready = frames if final else frames - self._reach.right
        if ready <= state.sent:
            return None
        first, last = ((frame - state.mel_start) * self._samples for frame in (state.sent, ready))
        window = state.mel[None]
        state.sent = ready
        drop = max(0, ready - self._reach.left - state.mel_start)
        state.mel = state.mel[:, drop:].clone()
        state.mel_start += drop
        return window, slice(first, last)
