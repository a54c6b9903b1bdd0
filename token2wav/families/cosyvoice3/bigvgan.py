"""BigVGAN folders, which model files of CosyVoice3 can name. `config.json` is read as data, and the
file of the weights is found.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from token2wav.config.values import convert, from_mapping, known_fields, prefixed, shown
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.hyperyaml import HyperYaml, ModelNode
from token2wav.published.sizes import BigVGANConfig
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


def vocoder_from(document: HyperYaml, folder: Path) -> tuple[BigVGANConfig, str]:
    """Reads the section `vocoder` of a model file, and `config.json` of the BigVGAN that it names.

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
    if sample_rate != config.sampling_rate:
        raise ConfigError(
            f"sample_rate: {sample_rate} Hz, but the BigVGAN has {config.sampling_rate} Hz"
        )
    return config, below
