"""What a stream keeps between its chunks, as one row of numbers: a batch is read and written in one launch each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from token2wav.vocoder.f0 import F0_LOOKAHEAD
from token2wav.vocoder.hift import HiFT
from token2wav.vocoder.incremental import left_reach_frames


@dataclass(frozen=True, eq=False)
class StreamRows:
    """Views of rows.

    Attributes:
        carry: (B, harmonics) double, phase of the harmonic source, see `frame_sines`.
        mel: (B, frames, bands) the last frames, or from the start on all there are.
        source: (B, source_frames, samples_per_frame) excitation from the same frame on.
    """

    carry: torch.Tensor
    mel: torch.Tensor
    source: torch.Tensor


class RowLayout:
    """Where everything stands in a row.

    Args:
        hift: the vocoder.

    Attributes:
        reach: frames before a sample's own that can influence it.
        lookahead: frames after it that can.
        frames: of mel that are kept: those of the reach, and those that were only looked ahead to.
        source_frames: of excitation that are kept: all of these that have an F0.
        width: float32 numbers in a row.
    """

    def __init__(self, hift: HiFT) -> None:
        config = hift.config
        self.reach, self.lookahead = left_reach_frames(config), hift.lookahead_frames
        self.frames = self.reach + self.lookahead
        self.source_frames = self.frames - F0_LOOKAHEAD
        self.bands, self.samples = config.in_channels, config.samples_per_frame
        self._doubles = 2 * (config.nb_harmonics + 1)  # two places each; first, so that they are aligned
        self._mel_end = self._doubles + self.frames * self.bands
        self._end = self._mel_end + self.source_frames * self.samples
        self.width = self._end + self._end % 2

    def views(self, rows: torch.Tensor) -> StreamRows:
        """Of rows (B, width)."""
        return StreamRows(
            carry=rows[:, : self._doubles].view(torch.float64),
            mel=rows[:, self._doubles : self._mel_end].unflatten(1, (self.frames, self.bands)),
            source=rows[:, self._mel_end : self._end].unflatten(1, (self.source_frames, self.samples)),
        )
