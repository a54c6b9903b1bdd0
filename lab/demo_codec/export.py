"""Export of the demo codec from the newest checkpoints.

The model folder is in the format of NanoCodec: a configuration, and weights in a safetensors file.
The encoder lies beside them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.demo_codec.codes import ENCODER_FILE
from lab.demo_codec.training import DecoderTraining, EncoderTraining
from lab.demo_voice.training import averaged_weights
from token2wav import Token2Wav
from token2wav.published.nemo_archive import CONFIG

TEMPLATE = Path(__file__).with_name("template")
_DECODER_FILE, _PROVENANCE = "model.safetensors", "training.json"
_ENCODER_PART = "encoder."


def export(training: Path, out: Path) -> None:
    """Writes configuration and averaged weights in float16, and checks the folder.

    The check loads the folder with `Token2Wav.load`, as a user does.

    Args:
        training: folder of the checkpoints.
    """
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(TEMPLATE / CONFIG, out)
    encoder, encoder_steps = averaged_weights(training, EncoderTraining.name)
    decoder, decoder_steps = averaged_weights(training, DecoderTraining.name)
    encoder_weights = {
        name.removeprefix(_ENCODER_PART): value
        for name, value in encoder.items()
        if name.startswith(_ENCODER_PART)
    }
    save_file(_narrow(encoder_weights), out / ENCODER_FILE)
    published = {_published(name): value for name, value in decoder.items()}
    save_file(_narrow(published), out / _DECODER_FILE)
    steps = {"encoder": {"steps": encoder_steps}, "decoder": {"steps": decoder_steps}}
    (out / _PROVENANCE).write_text(json.dumps(steps, indent=2) + "\n", encoding="utf-8")
    Token2Wav.load(out)


def _published(name: str) -> str:
    """Returns the name that NanoCodec gives to a weight."""
    layer, _, parameter = name.rpartition(".")
    wrapper = "activation.snake_act" if parameter == "alpha" else "conv"
    return f"audio_decoder.{layer}.{wrapper}.{parameter}"


def _narrow(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.half().contiguous() for name, value in weights.items()}
