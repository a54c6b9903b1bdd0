"""Windows of a stream, and the stage that decodes them, on a network whose audio is the number of
frames that it saw.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from token2wav.config.windows import Windows
from token2wav.networks.waveform_network import WindowNetwork
from token2wav.stages.stage import FrameChunk
from token2wav.stages.windows import WindowStage

SAMPLES = 40
WINDOWS = Windows(block=4, left=6, right=3, overlap=2, part=12)


class Count(WindowNetwork):
    """Decoder whose audio is the number of frames that its window has."""

    input_channels, frame_samples, input_dtype = 1, SAMPLES, torch.int32
    whole = Windows(block=12, left=0, right=3, overlap=0, part=12)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))  # has the device

    def forward(self, frames: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert positions.max() + frames.shape[2] <= 15
        count = frames.shape[2]
        return torch.full((len(frames), 1, count * SAMPLES), float(count)) * self.weight


def test_windows_of_a_stream() -> None:
    """The context does not reach into the part before, and ends at the end of the stream."""
    spans = [tuple(window) for window in WINDOWS.over(0, 26, 26)]
    assert spans == [
        # first, position, start, stop, fade_stop, last
        (0, 0, 0, 4, 6, 7),
        (0, 0, 4, 8, 10, 11),
        (2, 2, 8, 12, 14, 15),
        (12, 0, 12, 16, 18, 19),
        (12, 0, 16, 20, 22, 23),
        (14, 2, 20, 24, 26, 26),
        (24, 0, 24, 26, 26, 26),
    ]
    assert spans[2:4] == [tuple(window) for window in WINDOWS.over(8, 16, 20)]


@pytest.mark.parametrize("left", [0, 6, 8, 12, 100])
def test_the_longest_window_of_a_long_stream(left: int) -> None:
    windows = Windows(4, left, 3, 2, 12)
    lengths = [window.last - window.first for window in windows.over(0, 48, 48)]
    assert windows.longest == max(lengths)


class Shapes(Count):
    """Decoder that notes the shape of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = list[tuple[int, int]]()

    def forward(self, frames: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.shapes.append((frames.shape[0], frames.shape[2]))
        return torch.zeros(len(frames), 1, frames.shape[2] * SAMPLES)


@pytest.mark.parametrize(
    ("block", "blocks", "streams", "shapes"),
    [
        (1, 70, 1, [(32, 1), (32, 1), (6, 1)]),
        (3000, 1, 8, [(3, 3000), (3, 3000), (2, 3000)]),
        (20_000, 1, 2, [(1, 20_000)] * 2),
    ],
)
def test_a_batch_has_bounded_windows_and_frames(
    block: int, blocks: int, streams: int, shapes: list[tuple[int, int]]
) -> None:
    network = Shapes()
    stage = WindowStage(network, Windows(block, 0, 0, 0, block * blocks))
    chunk = FrameChunk(torch.zeros(1, block * blocks, dtype=torch.int32), last=True)
    audio = stage.advance([(stage.open(), chunk) for _ in range(streams)])
    assert network.shapes == shapes
    assert [len(samples) for samples in audio] == [block * blocks * SAMPLES] * streams


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_the_audio_fades_over_the_overlap(overlap: int) -> None:
    windows = Windows(4, 6, 3, overlap, 12)
    stage, frames = WindowStage(Count(), windows), torch.zeros(1, 26, dtype=torch.int32)
    [audio] = stage.advance([(stage.open(), FrameChunk(frames, last=True))])
    levels = [window.last - window.first for window in windows.over(0, 26, 26)]
    assert len(audio) == 26 * SAMPLES
    steps = np.abs(np.diff(audio.numpy()))
    for number, (before, after) in enumerate(pairwise(levels), 1):
        seam, fading = 4 * number * SAMPLES, min(overlap, 26 - 4 * number) * SAMPLES
        assert audio[seam - 1] == before
        assert audio[min(seam + fading, len(audio) - 1)] == pytest.approx(after, abs=0.01)
        # The slope of a squared sine is at most pi / 2 of its mean.
        largest = abs(after - before) * (1.58 / fading if fading else 1)
        assert steps[seam - 1 : seam + fading].max() <= largest + 1e-6


def test_a_failure_changes_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Count()
    stage, frames = WindowStage(network, WINDOWS), torch.zeros(1, 8, dtype=torch.int32)
    handle, first = stage.open(), FrameChunk(frames[:, :4], False, frames[:, 4:7])
    stage.advance([(handle, first)])
    rest = FrameChunk(frames[:, 4:], last=True)
    with monkeypatch.context() as broken:
        broken.setattr(network, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stage.advance([(handle, rest)])
    [audio] = stage.advance([(handle, rest)])
    assert len(audio) == 4 * SAMPLES
    assert audio[-1] == 8
    stage.close(handle)
    assert stage.open_streams == 0
