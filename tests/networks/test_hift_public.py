"""HiFT of other families against the audio that their public code computed, in double precision, of
the same mel.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import SEED, fill
from token2wav.networks.hift import HiFT
from token2wav.networks.sample_source import SampleSource
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
