"""The vocoder piece by piece: its reach, its phase, and what it keeps."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch

from tests.incremental.rig import AUDIO, Parts
from token2wav.vocoder.f0 import F0_LEFT_REACH
from token2wav.vocoder.incremental import IncrementalHiFT, VocoderState, left_reach_frames
from token2wav.vocoder.source import frame_sines

SAMPLES = 480  # per frame


def a_mel(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(80, frames, generator=torch.Generator().manual_seed(seed))


def pieces(vocoder: IncrementalHiFT, mel: torch.Tensor, size: int) -> torch.Tensor:
    state, parts = vocoder.start(), mel.split(size, dim=1)
    audio = [vocoder.advance(state, part, final=index == len(parts) - 1) for index, part in enumerate(parts)]
    assert state.speech_offset == SAMPLES * mel.shape[1]
    return torch.cat(audio)


def decoded(parts: Parts, mel: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return parts.hift.decode(mel[None], source, final=True)[0]


@pytest.mark.parametrize("phase", ["exact", "reference"])
@pytest.mark.parametrize("size", [1, 3, 8, 9, 50])
def test_any_pieces_equal_the_whole(parts: Parts, phase: Literal["exact", "reference"], size: int) -> None:
    vocoder = IncrementalHiFT(parts.hift, parts.source_noise, phase)
    mel = a_mel(100)
    assert float((pieces(vocoder, mel, size) - vocoder.whole(mel)).abs().max()) <= AUDIO


@pytest.mark.parametrize("first", [0, 1, 7, 8, 9, 30])
@pytest.mark.parametrize("last", [1, 2, 3, 4, 8])
def test_last_piece_shorter_than_the_look_ahead(parts: Parts, first: int, last: int) -> None:
    vocoder = IncrementalHiFT(parts.hift, parts.source_noise)
    mel, state = a_mel(first + last), vocoder.start()
    head = vocoder.advance(state, mel[:, :first], final=False)
    assert len(head) == SAMPLES * max(0, first - parts.hift.lookahead_frames)
    audio = torch.cat((head, vocoder.advance(state, mel[:, first:], final=True)))
    assert audio.shape == (SAMPLES * (first + last),)
    assert float((audio - vocoder.whole(mel)).abs().max()) <= AUDIO


def test_frames_beyond_the_reach_have_no_influence(parts: Parts) -> None:
    """Mel and excitation apart, as F0 reaches further through the phase; the bound is tight to 8 frames."""
    reach, at, frames = left_reach_frames(parts.config.hift), 80, 160
    mel = a_mel(frames)
    source = 0.3 * torch.randn(1, 1, SAMPLES * frames, generator=torch.Generator().manual_seed(1))
    loud_mel, loud_source = mel.clone(), source.clone()
    loud_mel[:, at] += 3
    loud_source[..., SAMPLES * at : SAMPLES * (at + 1)] += 3
    base = decoded(parts, mel, source)
    ends = []
    for changed in (decoded(parts, loud_mel, source), decoded(parts, mel, loud_source)):
        difference = (changed - base).abs()
        assert float(difference[SAMPLES * (at + reach + 1) :].max()) <= 1e-6
        ends.append(int(difference.nonzero().max()) // SAMPLES - at)
    assert reach - 8 <= max(ends) <= reach


def test_reach_of_f0(parts: Parts) -> None:
    mel, at = a_mel(60), 30
    changed = mel.clone()
    changed[:, at] += 3
    with torch.inference_mode():
        before, after = (parts.hift.f0_predictor(each[None], final=True)[0] for each in (mel, changed))
    moved = (after - before).abs().nonzero().flatten()
    assert int(moved.max()) == at + F0_LEFT_REACH
    assert int(moved.min()) == at - 3


def test_phase_of_an_hour_carried_on_equals_double_precision() -> None:
    frames, hop = 3600 * 50, 50
    random = np.random.default_rng(0)
    increments = random.uniform(0, 0.02, (frames, 2)).astype(np.float32)
    carry = None
    for start in range(0, frames, 20 * hop):
        part = torch.from_numpy(increments[None, start : start + 20 * hop])
        _, carries = frame_sines(part, SAMPLES, "exact", carry)
        carry = carries[:, -1]
    assert carry is not None
    for harmonic in range(2):
        cycles = math.fsum(increments[:, harmonic].astype(np.float64) * SAMPLES) % 1
        distance = abs(float(carry[0, harmonic]) - cycles)
        assert min(distance, 1 - distance) <= 1e-9


@pytest.mark.parametrize("size", [1, 7, 300])
def test_sines_with_the_reference_phase_do_not_depend_on_the_pieces(size: int) -> None:
    increments = torch.rand(1, 3000, 9, generator=torch.Generator().manual_seed(0)) * 0.02
    whole, _ = frame_sines(increments, SAMPLES, "reference", None)
    carry, sines = None, []
    for part in increments.split(size, dim=1):
        sine, carries = frame_sines(part, SAMPLES, "reference", carry)
        carry = carries[:, -1]
        sines.append(sine)
    # Sums in another order round to another float32 now and then: one unit of a sum of 30, times 480, in radians.
    assert float((torch.cat(sines, dim=1) - whole).abs().max()) <= 2 * math.pi * SAMPLES * 2**-19
    assert float((torch.cat(sines, dim=1) == whole).float().mean()) > 0.999


def sizes(state: VocoderState) -> tuple[int, int]:
    return state.mel.untyped_storage().nbytes(), state.source.untyped_storage().nbytes()


def test_state_stays_bounded(parts: Parts) -> None:
    vocoder = IncrementalHiFT(parts.hift, parts.source_noise)
    state, seen = vocoder.start(), []
    for part in a_mel(2000).split(50, dim=1):
        vocoder.advance(state, part, final=False)
        seen.append(sizes(state))
    assert len(set(seen[4:])) == 1
    kept = left_reach_frames(parts.config.hift) + parts.hift.lookahead_frames
    assert state.mel.shape[1] <= kept
    assert seen[-1][0] <= 4 * 80 * kept
