"""BigVGAN folders, which model files of CosyVoice3 can name. `config.json` is read as data, and the
file of the weights is found.
"""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath

from token2wav.config.values import convert, from_mapping, known_fields, prefixed, shown
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.hyperyaml import HyperYaml, ModelNode
from token2wav.published.sizes import BigVGANConfig, MelSettings
from token2wav.published.transformers_json import CONFIG_JSON, read_json

# Names of files with the weights, in order of preference.
GENERATOR_FILES = ("generator.safetensors", "bigvgan_generator.pt", "generator.pt")


def read_bigvgan(folder: Path) -> BigVGANConfig:
    """Reads `config.json` of a BigVGAN folder. Settings that only training uses are skipped."""
    path = folder / CONFIG_JSON
    if not path.is_file():
        raise ConfigError(f"{folder}: not a BigVGAN folder, {CONFIG_JSON} cannot be read")
    document = read_json(path)
    with prefixed(f"{path}: "):
        return from_mapping(BigVGANConfig, known_fields(BigVGANConfig, document), "")


def vocoder_from(
    document: HyperYaml, folder: Path, token_frame_rate: float, token_mel_ratio: int, bands: int
) -> tuple[BigVGANConfig, str]:
    """Reads the section `vocoder` of a model file, and `config.json` of the BigVGAN that it names.

    Args:
        token_frame_rate: tokens per second.
        token_mel_ratio: mel frames per token.
        bands: mel bands of the flow.

    Returns:
        The configuration, and the folder of BigVGAN below the model folder.
    """
    section = ModelNode.of(document.resolve("vocoder"), "vocoder")
    if unknown := [str(key) for key in section.data if key not in ("type", "folder")]:
        raise ConfigError(f"vocoder: unknown key {shown(unknown[0])}; expected type or folder")
    if (kind := section.get("type", str)) != "bigvgan":
        raise ConfigError(
            f"vocoder.type: {shown(kind)} is not bigvgan; for HiFT, remove the section vocoder"
        )
    below = section.get_or("folder", str, ".")
    if (path := PurePosixPath(below)).is_absolute() or ".." in path.parts:
        raise ConfigError(f"vocoder.folder: {shown(below)} is not a folder below the model folder")
    config = read_bigvgan(folder / below)
    sample_rate = convert(document.resolve("sample_rate"), bounded.SampleRate, "sample_rate")
    hop = sample_rate / (token_frame_rate * token_mel_ratio)
    if not math.isclose(hop, round(hop), rel_tol=1e-6):
        raise ConfigError(
            f"sample_rate: {sample_rate} Hz gives {hop:.2f} samples to each of "
            f"{token_frame_rate:g} x {token_mel_ratio} mel frames per second; the number "
            "must be whole"
        )
    check_mel(config, MelSettings(sample_rate, round(hop), bands))
    return config, below


def check_mel(config: BigVGANConfig, flow: MelSettings) -> None:
    """Compares the mel settings of a vocoder with the mel settings of a flow."""
    names = ("sampling_rate", "hop_size", "num_mels")
    if differing := [
        f"{name} is {vocoder_value} instead of {flow_value}"
        for name, vocoder_value, flow_value in zip(names, config.mel, flow, strict=True)
        if vocoder_value != flow_value
    ]:
        raise ConfigError(
            f"BigVGAN: {', '.join(differing)}; use a BigVGAN that was trained on the mels "
            "of the flow"
        )
