"""A StreamFlow model before a BigVGAN, small and fast, with the published rates: 16 kHz, mel frames
of 10 ms.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import yaml
from safetensors.torch import load_file, save_file

from testkit.models import bigvgan_model
from testkit.models.bigvgan import random_bigvgan
from testkit.models.sized import fill_randomly

FLOW = {
    "dim": 32,
    "depth": 4,
    "heads": 2,
    "dim_head": 16,
    "n_timesteps": 3,
    "backward_layers": [2, 3],
    "forward_layers": [1],
}
VOCODER = dataclasses.replace(bigvgan_model.VOCODER, num_mels=80)
SAMPLE_RATE = 16_000
SAMPLES_PER_TOKEN = 4 * 160


def write_model(folder: Path) -> Path:
    """Writes the model and returns its folder.

    Attention has an effect, and the audio is neither silent nor at its limits.
    """
    (folder / "bigvgan").mkdir(parents=True)
    document = {
        "sample_rate": SAMPLE_RATE,
        "flow": {"type": "streamflow", **FLOW},
        "vocoder": {"type": "bigvgan", "folder": "bigvgan"},
    }
    (folder / "streamflow.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    (folder / "bigvgan" / "config.json").write_text(json.dumps(dataclasses.asdict(VOCODER)))
    fill_randomly(folder)
    weights = load_file(folder / "flow.safetensors")
    # All tensors are new, because a tensor that was read may be a view of the file that is written.
    scaled = {name: value * (3 if "attn.to_" in name else 1) for name, value in weights.items()}
    save_file(scaled, folder / "flow.safetensors")
    save_file(random_bigvgan(VOCODER).state_dict(), folder / "bigvgan" / "generator.safetensors")
    return folder
