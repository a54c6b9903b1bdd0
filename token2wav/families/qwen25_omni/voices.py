"""Voices of Qwen2.5-Omni. `spk_dict.pt` in the model folder has a vector and a reference mel for
each speaker. ECAPA-TDNN turns the mel into a second vector, once for each voice.

This program writes a voice file for each speaker:

    python -m token2wav.families.qwen25_omni.voices MODEL_FOLDER OUTPUT_FOLDER
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from token2wav.errors import CheckpointError, Token2WavError
from token2wav.families.qwen25_omni import PREFIXES, read
from token2wav.networks.ecapa import Ecapa
from token2wav.networks.weights import fill, fitting_weights, read_state
from token2wav.published.checkpoint_files import weights_file
from token2wav.published.sizes import EcapaConfig
from token2wav.voice import FIELDS, MEL_BOUND, Voice

SPEAKERS = "spk_dict.pt"
_MOST_FRAMES = 12_000  # two minutes
_NAME = re.compile(r"\w[\w -]{0,99}")  # a name of a file everywhere


def named_voices(folder: Path) -> dict[str, Voice]:
    """Reads the voices of a model folder. The file is read without executing any of its content.

    A voice has no prompt. Its speaker embedding is the vector `cond`, followed by the output of
    ECAPA-TDNN for `ref_mel`. So it belongs to the weights of this folder.

    Raises:
        ConfigError: the configuration of the folder cannot be used.
        CheckpointError: the weights or the speakers cannot be used.
    """
    config, path = read(folder), folder / SPEAKERS
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; it has the voices of the model")
    encoder, voices = config.flow.encoder, {}
    network = _ecapa(folder, encoder)
    cond_size = config.speaker_size - encoder.dim
    for name, speaker in read_state(path).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise CheckpointError(f"{path}: {name!r:.80} is no name of a speaker")
        if not isinstance(speaker, dict):
            raise CheckpointError(f"{path}: '{name}' has no cond and ref_mel")
        cond = _tensor(speaker, "cond", f"{path}: '{name}'").reshape(1, -1)
        mel = _tensor(speaker, "ref_mel", f"{path}: '{name}'")
        if cond.shape[1] != cond_size:
            raise CheckpointError(
                f"{path}: '{name}'.cond has {cond.shape[1]} numbers, expected {cond_size}"
            )
        mel = mel[None] if mel.dim() == 2 else mel
        if mel.dim() != 3 or mel.shape[0] != 1 or mel.shape[2] != encoder.mel_dim:
            raise CheckpointError(
                f"{path}: '{name}'.ref_mel has the shape {tuple(mel.shape)}, expected "
                f"(1, frames, {encoder.mel_dim})"
            )
        if not encoder.least_frames <= mel.shape[1] <= _MOST_FRAMES:
            raise CheckpointError(
                f"{path}: '{name}'.ref_mel has {mel.shape[1]} frames; expected "
                f"{encoder.least_frames} to {_MOST_FRAMES}"
            )
        with torch.inference_mode():
            [embedding] = torch.cat((cond, network(mel.transpose(1, 2))), dim=1)
        voices[name] = Voice(
            np.zeros(0, np.int32), np.zeros((0, config.mel_bands), np.float32), embedding.numpy()
        )
    return voices


def write_voices(folder: Path, output: Path) -> list[Path]:
    """Writes a voice file for each speaker of a model folder, and returns their paths."""
    voices = named_voices(folder)
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, voice in voices.items():
        paths.append(output / f"{name}.safetensors")
        save_file({field: getattr(voice, field) for field in FIELDS}, paths[-1])
    return paths


def _ecapa(folder: Path, config: EcapaConfig) -> Ecapa:
    """Loads ECAPA-TDNN of a model folder, without the rest of the flow."""
    prefix = f"{PREFIXES['flow']}input_embed.spk_encoder."
    path = weights_file(folder)
    published = read_state(path, (prefix,))
    weights = {name.removeprefix(prefix): value for name, value in published.items()}
    network = Ecapa(config)
    fill(network, fitting_weights(network, weights, path))
    return network.eval()


def _tensor(speaker: dict[str, Any], key: str, owner: str) -> torch.Tensor:
    """Returns a tensor of a speaker in float32, with bounded numbers."""
    value = speaker.get(key)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise CheckpointError(f"{owner}.{key}: expected a tensor of numbers")
    value = value.float()
    if not value.abs().le(MEL_BOUND).all():
        raise CheckpointError(
            f"{owner}.{key}: has numbers that are not between {-MEL_BOUND:g} and {MEL_BOUND:g}"
        )
    return value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of Qwen2.5-Omni")
    parser.add_argument("output", type=Path, help="folder for the voice files")
    options = parser.parse_args()
    try:
        for path in write_voices(options.model, options.output):
            print(path)
    except (Token2WavError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
