"""Error of audio that codecs with symmetric convolutions send early, by the frames held back.

A chunk that holds back fewer frames than the decoder reads ahead computes its last samples as if
its last frame were repeated (`stream.lookahead_frames`). The error is that of the last frame before
the end of a chunk, which is the largest. Weights are random and of the published sizes, and codes
are random too. The error depends on the weights, so there are two kinds:

- `weak`: the output of a residual unit is small beside its input, as in the tests.
- `strong`: the output of a residual unit is four times larger, about as large as its input.

    .venv/bin/python -m lab.codec_early_audio
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.environment import describe, save
from testkit.models.codec_models import CODECS
from testkit.models.published_codecs import PUBLISHED as ALL
from token2wav.assembly import load_network
from token2wav.layers.combine import Residual
from token2wav.networks.symmetric_decoder import SymmetricDecoder
from token2wav.published.registry import read_config

_HIGGS_RATES = [8, 5, 4, 2, 3]
PUBLISHED: dict[str, dict[str, Any]] = {
    "DAC 44.1 kHz": ALL["DAC"],
    "DAC 24 kHz": ALL["DAC 24 kHz"],
    "DAC 16 kHz": {**ALL["DAC 24 kHz"], "sampling_rate": 16000, "n_codebooks": 12},
    "Higgs Audio": {
        "target_bandwidths": [0.5, 1, 1.5, 2],
        "acoustic_model_config": {
            "downsampling_ratios": _HIGGS_RATES,
            "upsampling_ratios": _HIGGS_RATES,
        },
    },
    "SNAC 24 kHz": ALL["SNAC"],
}
_FRAMES, _STOPS = 64, (24, 30, 37, 45)
_STRONGER = 4.0


def row(name: str, *, strong: bool) -> dict[str, Any]:
    """Measures one model."""
    with tempfile.TemporaryDirectory() as folder:
        path = CODECS[name.split()[0].lower()].write(Path(folder), PUBLISHED[name])
        config = read_config(path)
        network = load_network(path, config, "decoder")
    if strong:
        for module in network.modules():
            if isinstance(module, Residual):
                conv: Any = module.conv2
                conv.weight *= _STRONGER
    sizes = config.tokens.codebook_sizes
    codes = np.random.default_rng(0).integers(0, sizes[0], (1, len(sizes), _FRAMES))
    errors = errors_of(network, torch.from_numpy(codes))
    reach = 1000 * network.output_delay / config.sample_rate
    frame = 1000 / config.token_frame_rate
    return {
        "model": name,
        "weights": "strong" if strong else "weak",
        "reach_samples": network.output_delay,
        "reach_ms": round(reach, 1),
        "withheld_frames": [
            {"frames": held, "earlier_ms": round(reach - held * frame, 1), **error}
            for held, error in enumerate(errors)
        ],
    }


def errors_of(network: Any, codes: torch.Tensor) -> list[dict[str, float]]:
    """Returns SNR and jump by the number of frames held back, up to the reach of the decoder.

    The jump is the error of the last sample of a chunk, in units of the usual step from sample to
    sample. Both are measured before the final tanh of DAC, which would hide errors if it clips.
    """
    samples, reach = network.frame_samples, network.lookahead_frames
    audio: list[torch.Tensor] = []
    for module in network.modules():
        if isinstance(module, SymmetricDecoder):
            module.register_forward_hook(lambda _module, _inputs, out: audio.append(out[0, 0]))
    with torch.inference_mode():
        network(codes)
        for stop in _STOPS:
            repeated = codes[:, :, stop - 1 : stop].expand(-1, -1, reach + 1)
            network(torch.cat((codes[:, :, :stop], repeated), dim=2))
    whole, *cut = audio
    level, usual = whole.square().mean(), whole.diff().square().mean()
    results = []
    for held in range(reach):
        parts = []
        for stop, heard in zip(_STOPS, cut, strict=True):
            frame = slice((stop - held - 1) * samples, (stop - held) * samples)
            parts.append(heard[frame] - whole[frame])
        errors = torch.stack(parts).square()
        snr = float(10 * torch.log10(level / errors.mean()))
        jump = float((errors[:, -1].mean() / usual).sqrt())
        results.append({"snr_db": round(snr, 1), "jump": float(f"{jump:.2g}")})
    return results


def main() -> None:
    rows = []
    for name in PUBLISHED:
        for strong in (False, True):
            rows.append(row(name, strong=strong))
            print(rows[-1], flush=True)
    save("codec_early_audio", {"environment": describe(), "rows": rows})


if __name__ == "__main__":
    main()
