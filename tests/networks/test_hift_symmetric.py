"""HiFT with symmetric convolutions in pieces equals the whole, delayed by its look-ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from testkit.kernel_vocoder import PUBLIC as CONFIG
from token2wav.cache.states import StateStore
from token2wav.layers.streaming import StreamStep, state_specs
from token2wav.networks.hift import HiFT
from token2wav.networks.sample_source import SampleSource
from token2wav.networks.source import HarmonicSource

FRAMES, FRAME_SAMPLES, BANDS = 60, 480, 8
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def hift() -> HiFT:
    return frozen()


@pytest.fixture(scope="module")
def sampled() -> HiFT:
    """HiFT with a source that advances its phase sample by sample."""
    return frozen(SampleSource)


def frozen(source: type[HarmonicSource] | None = None) -> HiFT:
    torch.manual_seed(3)
    hift = HiFT(CONFIG, source)
    torch.nn.init.constant_(hift.f0_predictor.classifier.bias, 120)
    torch.nn.init.normal_(hift.f0_predictor.classifier.weight, std=60)
    hift.freeze()
    return hift


def noise_at(noise: torch.Tensor, start: int, frames: int) -> torch.Tensor:
    """Returns the noise of frames, some of which may lie outside the available frames."""
    at = torch.arange(start * FRAME_SAMPLES, (start + frames) * FRAME_SAMPLES)
    return noise[at.clamp(0, len(noise) - 1)]


@torch.inference_mode()
def in_pieces(
    hift: HiFT, mel: torch.Tensor, noise: torch.Tensor, stops: Sequence[int]
) -> torch.Tensor:
    store = StateStore({"vocoder": state_specs(hift)}, mel.device, slots=2)
    slot, rows, start = torch.tensor([store.take()]), store.rows("vocoder", 1), 0
    audio = []
    for stop in stops:
        frames_past_end = hift.lookahead_frames if stop == stops[-1] else 0
        part = torch.cat((mel[:, :, start:stop], torch.randn(1, BANDS, frames_past_end)), dim=2)
        if start:
            store.read(slot, rows)
        step = StreamStep(
            rows.views, first=not start, frames=part.shape[2], frames_past_end=frames_past_end
        )
        new = hift(part, noise_at(noise, start - hift.m_source.input.delay, part.shape[2]), step)
        store.write(slot, rows)
        delay = hift.output_delay
        end = (stop - start) * FRAME_SAMPLES + (delay if frames_past_end else 0)
        audio.append(new[:, delay if not start else 0 : end])
        start = stop
    return torch.cat(audio, dim=1)


@pytest.mark.parametrize("stops", [(30, 60), (22, 23, 40, 60), (60,)], ids=str)
@pytest.mark.parametrize("source", ["hift", "sampled"])
def test_pieces_give_the_whole(
    source: str, stops: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    hift: HiFT = request.getfixturevalue(source)
    mel, noise = torch.randn(1, BANDS, FRAMES), torch.randn(FRAMES * FRAME_SAMPLES)
    whole = hift(mel, noise)
    assert whole.shape == (1, FRAMES * FRAME_SAMPLES)
    torch.testing.assert_close(in_pieces(hift, mel, noise, stops), whole, atol=ROUNDING, rtol=0)


def test_the_output_delay_equals_the_lookahead_of_the_layers(hift: HiFT) -> None:
    # Delay of the mel through F0: 5 frames, half a frame to the middle of the next one, and the
    # network.
    assert hift.m_source.output.delay == 5 * FRAME_SAMPLES + FRAME_SAMPLES // 2
    assert (hift.output_delay, hift.lookahead_frames) == (9660, 21)
    mel = torch.randn(1, BANDS, FRAMES)
    changed = mel.clone()
    changed[:, :, 40:] += 1
    one, other = (hift(value, torch.zeros(FRAMES * FRAME_SAMPLES))[0] for value in (mel, changed))
    first = int((one - other).abs().gt(1e-9).nonzero().min())
    assert 40 * FRAME_SAMPLES - hift.output_delay <= first < 35 * FRAME_SAMPLES


def test_a_causal_one_holds_back_less() -> None:
    causal = HiFT(replace(CONFIG, causal=True, conv_pre_look_right=4))
    assert causal.output_delay == 4 * FRAME_SAMPLES + 4
    assert not any(wait.state_shape for wait in (*causal.spectrum_waits, *causal.branch_waits))
