"""VibeVoice: factors of latents, and the memory of a load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from testkit.models.family_golden import FamilyGolden
from testkit.models.vibevoice_model import write_microsoft, write_transformers
from testkit.utterances import off
from token2wav import RuntimeConfig, Token2Wav

# Of the spread of the audio. Sums are in another order than in the public code.
PARITY = 1e-5
CPU = RuntimeConfig(device="cpu")
GOLDEN = FamilyGolden("vibevoice", "tiny")
# A whole model whose decoder is a small part of one file: its language model has 256 MB in
# bfloat16, the decoder 40 MB in float32.
LARGE = {"num_filters": 128, "downsampling_ratios": [2, 2, 2], "depths": [1, 1, 1, 4]}
PEAK = """
import resource, sys
from pathlib import Path
from token2wav.assembly import load_network
from token2wav.published.registry import read_config

folder = Path(sys.argv[1])
config = read_config(folder)
peak = lambda: next(
    int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")
)
before = peak()
network = load_network(folder, config, "decoder")
weights = sum(value.numel() * 4 for value in network.parameters()) // 1024
print(peak() - before, weights)
"""


def test_latents_are_scaled_by_the_factors_of_the_folder(tmp_path: Path) -> None:
    """The public code divides by the scale, and then subtracts the bias."""
    write_microsoft(tmp_path, GOLDEN, factors=(0.25, -0.5))
    model, golden = Token2Wav.load(tmp_path, runtime=CPU), GOLDEN["audio"].numpy()
    scaled = 0.25 * (GOLDEN["latents"].numpy() - 0.5)
    assert off(model.synthesize(scaled), golden) <= 2 * PARITY * golden.std()


def test_only_the_decoder_is_read(tmp_path: Path) -> None:
    """Loading takes the memory of the decoder in float32, and at most 200 MB more."""
    golden = FamilyGolden("vibevoice", "tiny")
    golden.__dict__["sizes"] = {**golden.sizes, **LARGE}
    write_transformers(tmp_path, golden)
    weights = load_file(tmp_path / "model.safetensors")
    halves = {name: value.bfloat16() for name, value in weights.items()}
    halves["model.language_model.weight"] = torch.ones(1 << 27, dtype=torch.bfloat16)
    save_file(halves, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    grown, size = map(int, subprocess.check_output(command, text=True).split())
    assert size > 20_000
    assert grown <= size + 200_000  # KB
