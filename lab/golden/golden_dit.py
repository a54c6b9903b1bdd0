"""Golden velocities of CosyVoice's DiT with a long skip connection, from its public class.

No package has this class, so it is read from a checkout of the repository FunAudioLLM/CosyVoice, in
the environment that `public_families.py` describes, with `pip install --no-deps x-transformers`:

    PYTHONPATH=CosyVoice:. public/bin/python -m lab.golden.golden_dit tests/data/families/cosyvoice3
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from lab.golden.public_packages import EmptyModule
from testkit.models.random_weights import SEED, fill

BANDS, FRAMES = 8, 30
SIZES = {
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "dim_head": 16,
    "ff_mult": 2,
    "mel_dim": BANDS,
    "mu_dim": BANDS,
    "spk_dim": BANDS,
    "out_channels": BANDS,
    "static_chunk_size": 10,
    "long_skip_connection": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    sys.modules["torchaudio"] = EmptyModule("torchaudio")
    from cosyvoice.flow.DiT.dit import DiT

    estimator = fill(DiT(**SIZES))
    random = torch.Generator().manual_seed(SEED)
    x, mu, cond = (torch.randn(2, BANDS, FRAMES, generator=random) for _ in range(3))
    inputs = {"x": x, "mu": mu, "cond": cond, "spks": torch.randn(2, BANDS, generator=random)}
    inputs |= {"t": torch.tensor([0.3, 0.8]), "mask": torch.ones(2, 1, FRAMES)}
    with torch.inference_mode():
        golden = {
            name: estimator(**inputs, streaming=streaming).contiguous()
            for name, streaming in (("velocity_streaming", True), ("velocity_full", False))
        }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "long_skip.safetensors"
    save_file({**inputs, **golden}, path, {"sizes": json.dumps(SIZES), "seed": str(SEED)})
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
