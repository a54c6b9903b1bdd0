"""HiFT: the audio that the public code of other families computed in double precision of the same
mel, slopes near zero, and the phase of the source from step to step.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import SEED, fill
from token2wav.networks.hift import HiFT
from token2wav.networks.hift_layers import FoldableSnake, ResBlock
from token2wav.networks.sample_source import SampleSource
from token2wav.networks.source import frame_sines
from token2wav.published.sizes import HiFTConfig

TOLERANCE = 1e-4


def published(golden: FamilyGolden) -> HiFT:
    """Vocoder with the published sizes except for its widths."""
    sizes = dict(zip(("base_channels", "f0_channels"), golden.sizes["vocoder"], strict=True))
    source = SampleSource if golden.family == "chatterbox" else None
    hift = fill(HiFT(HiFTConfig(**sizes), source))
    hift.freeze()
    return hift


def drawn(hift: HiFT, samples: int) -> torch.Tensor:
    """Returns noise as `lab/golden/golden_families.py` draws it.

    The random phases at which harmonics begin are written into the source.
    """
    harmonics, random = hift.config.nb_harmonics + 1, np.random.default_rng([SEED, 6])
    if not isinstance(hift.m_source, SampleSource):
        return torch.from_numpy(random.standard_normal((samples, harmonics))).float()
    begins = torch.from_numpy(np.random.default_rng([SEED, 5]).random(harmonics)) - 0.5
    begins[0] = 0
    hift.m_source.begins.copy_(begins)
    return torch.from_numpy(random.standard_normal((harmonics, samples)).T).float()


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("cosyvoice2", "tiny"),
        ("cosyvoice2", "small"),
        ("stepaudio2", "tiny"),
        ("chatterbox", "tiny"),
    ],
)
def test_public_audio(family: str, size: str) -> None:
    golden = FamilyGolden(family, size)
    hift, mel = published(golden), golden["vocoder_mel"][None]
    noise = hift.m_source.merged(drawn(hift, golden["audio"].numel()))
    f0 = hift.f0_predictor(mel)
    torch.testing.assert_close(f0[0].float(), golden["f0"], atol=TOLERANCE, rtol=0)
    source = hift.m_source(f0, noise)
    torch.testing.assert_close(source[0], golden["source"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(hift(mel, noise)[0], golden["audio"], atol=TOLERANCE, rtol=0)


def drawn_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_formula(block: ResBlock, x: torch.Tensor) -> torch.Tensor:
    def snake(x: torch.Tensor, activation: FoldableSnake) -> torch.Tensor:
        alpha = activation.alpha[:, None]
        return x + torch.sin(alpha * x) ** 2 / (alpha + 1e-9)

    layers = zip(block.activations1, block.convs1, block.activations2, block.convs2, strict=True)
    for snake1, conv1, snake2, conv2 in layers:
        assert isinstance(snake1, FoldableSnake)
        assert isinstance(snake2, FoldableSnake)
        x = x + conv2(snake(conv1(snake(x, snake1)), snake2))
    return x


@pytest.mark.parametrize("least", [0.0, 1e-3, 0.02, 0.5], ids=str)
def test_slopes_in_the_weights_of_convolutions(least: float) -> None:
    """Slopes of 0 and near it, too, by which nothing can be divided."""
    block, x = ResBlock(5, 3, (1, 3)).requires_grad_(False), drawn_numbers(2, 5, 40)
    for number, module in enumerate(block.modules()):
        if isinstance(module, FoldableSnake):
            module.alpha.copy_(least + drawn_numbers(5, seed=number).abs())
            module.alpha[number % 5] = -least
        if torch.nn.utils.parametrize.is_parametrized(module, "weight"):
            torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    expected = by_formula(block, x)
    for module in block.modules():
        if isinstance(module, FoldableSnake):
            module.freeze()
    block.freeze()
    assert float((block(x) - expected).abs().max()) <= 2e-6 * float(expected.abs().max())


def test_the_phase_goes_on_in_the_next_step() -> None:
    increments = torch.rand(2, 50, 3, generator=torch.Generator().manual_seed(0)) / 100
    whole, end = frame_sines(increments, 480, "exact", None)
    first, carry = frame_sines(increments[:, :20], 480, "exact", None)
    second, after = frame_sines(increments[:, 20:], 480, "exact", carry)
    assert torch.allclose(torch.cat((first, second), 1), whole, atol=1e-6)
    assert torch.allclose(after, end, rtol=0, atol=1e-12)  # no step rounds the phase to float32
