"""Vocoder that holds back less than its look-ahead.

Its audio comes earlier by a known time, and is exact again after every seam.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from testkit.kernel_vocoder import PUBLIC as CONFIG
from testkit.models.random_weights import fill
from tests.networks.test_hift_symmetric import BANDS, FRAME_SAMPLES
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import NormalNoise
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage

LOOKAHEAD, STOPS = 8, (50, 70, 150, 153)
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def hift() -> HiFT:
    hift = fill(HiFT(CONFIG))
    hift.freeze()
    return hift


def stage(hift: HiFT, lookahead_frames: int) -> WaveformStage:
    return WaveformStage(hift, NormalNoise(9), lookahead_frames=lookahead_frames)


def spoken(
    stage: WaveformStage, mels: Sequence[torch.Tensor], stops: Sequence[int]
) -> list[list[torch.Tensor]]:
    """Returns the audio of every chunk of utterances that run side by side."""
    handles, chunks, start = [stage.open() for _ in mels], [], 0
    for stop in stops:
        last = stop == stops[-1]
        batch = [
            (handle, FrameChunk(mel[:, start:stop], last))
            for handle, mel in zip(handles, mels, strict=True)
        ]
        chunks.append(stage.advance(batch))
        start = stop
    for handle in handles:
        stage.close(handle)
    assert stage.open_streams == stage.store.used == 0
    return [list(pieces) for pieces in zip(*chunks, strict=True)]


@pytest.mark.parametrize("stops", [STOPS, (5, 12, 18, 60)], ids=["long", "short"])
def test_only_the_ends_of_chunks_differ(hift: HiFT, stops: tuple[int, ...]) -> None:
    """The first chunks may also be shorter than the look-ahead, or than the frames held back."""
    mel = torch.randn(BANDS, stops[-1])
    exact, extrapolating = stage(hift, 0), stage(hift, LOOKAHEAD)
    whole, [pieces] = exact.whole(mel), spoken(extrapolating, [mel], stops)
    sent = [sum(len(piece) for piece in pieces[: index + 1]) for index in range(len(pieces))]
    assert sent == [max(0, stop - LOOKAHEAD) * FRAME_SAMPLES for stop in stops[:-1]] + [
        stops[-1] * FRAME_SAMPLES
    ]
    off = (torch.cat(pieces) - whole).abs()
    guessed = torch.zeros(len(whole), dtype=torch.bool)
    for stop, end in zip(stops, sent[:-1], strict=False):
        guessed[max(0, stop * FRAME_SAMPLES - hift.output_delay) : end] = True
    assert off[~guessed].max() <= ROUNDING
    assert off[guessed].max() > 100 * ROUNDING
    torch.testing.assert_close(
        torch.cat(spoken(exact, [mel], stops)[0]), whole, atol=ROUNDING, rtol=0
    )


def test_holding_more_is_closer(hift: HiFT) -> None:
    """The last frame before a seam, by the frames that are held back; docs/models.md has the
    figures.
    """
    frames = torch.randn(1, BANDS, 41, generator=torch.Generator().manual_seed(1))
    mel = F.interpolate(frames, 200, mode="linear")[0]  # which changes as slowly as speech does
    whole = stage(hift, 0).whole(mel)
    usual = whole.diff().square().mean().sqrt()  # from one sample to the next
    snr, jump = dict[int, float](), dict[int, float]()
    for hold in (4, 8, 12, 16):
        [pieces] = spoken(stage(hift, hold), [mel], (50, 100, 150, 200))
        ends = [sum(len(piece) for piece in pieces[: index + 1]) for index in range(3)]
        off = torch.cat(pieces) - whole
        errors = torch.stack([off[end - FRAME_SAMPLES : end] for end in ends])
        snr[hold] = float(10 * torch.log10(whole.square().mean() / errors.square().mean()))
        jump[hold] = float(errors[:, -1].square().mean().sqrt() / usual)
    assert all(snr[hold] > least for hold, least in {4: 0, 8: 10, 12: 25, 16: 60}.items()), snr
    assert all(jump[hold] < most for hold, most in {4: 1, 8: 0.5, 12: 0.05, 16: 1e-3}.items()), jump


def test_batched_is_alone(hift: HiFT) -> None:
    mels = [torch.randn(BANDS, STOPS[-1]) for _ in range(3)]
    extrapolating = stage(hift, LOOKAHEAD)
    for mel, pieces in zip(mels, spoken(extrapolating, mels, STOPS), strict=True):
        torch.testing.assert_close(
            torch.cat(pieces), torch.cat(spoken(extrapolating, [mel], STOPS)[0]), atol=1e-5, rtol=0
        )
