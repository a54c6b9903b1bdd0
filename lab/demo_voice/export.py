"""Export of the demo voice from the newest checkpoints.

    python -m lab.demo_voice.export --data DIR

DIR is the data folder of the recipe.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from lab.demo_voice.folder import FRONT_END, MODEL, TEMPLATE, TRAINING
from lab.demo_voice.training import averaged_weights
from token2wav import Token2Wav
from token2wav.families.cosyvoice3 import MODEL_FILE, CosyVoice3Config
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.networks.hift import HiFT
from token2wav_voice.onnx_models import SPEAKER_FILE, TOKENIZER_FILE

_PROVENANCE = "training.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the demo voice's model folder from the newest checkpoints."
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder of the checkpoints"
    )
    parser.add_argument(
        "--out", type=Path, default=MODEL, metavar="DIR", help="model folder (default: the demo's)"
    )
    options = parser.parse_args()
    export(options.data, options.out)
    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"export: {options.out}: {size / 1e6:.1f} MB")


def export(data: Path, out: Path) -> None:
    """Writes configuration, averaged weights in float16 and both ONNX files, and checks the folder.

    The check loads the folder with `Token2Wav.load`, as a user does.
    """
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(TEMPLATE / MODEL_FILE, out)
    config = CosyVoice3Config.read(out)
    modules: dict[str, nn.Module] = {"flow": Flow(config.flow), "hift": HiFT(config.vocoder)}
    provenance = {}
    for name, module in modules.items():
        weights, step = averaged_weights(data / TRAINING, name)
        (out / f"{name}.safetensors").write_bytes(save(_narrow(module, weights)))
        provenance[name] = {
            "steps": step,
            "parameters": sum(value.numel() for value in module.parameters()),
        }
    for name in (TOKENIZER_FILE, SPEAKER_FILE):
        shutil.copy(data / FRONT_END / name, out)
    (out / _PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    Token2Wav.load(out)


def _narrow(module: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts parameters to float16.

    Buffers keep their precision: some need it, such as rotary frequencies, and they are small.
    """
    parameters = dict(module.named_parameters())
    return {
        name: weights[name].half() if name in parameters else weights[name].contiguous()
        for name in module.state_dict()
    }


if __name__ == "__main__":
    main()
