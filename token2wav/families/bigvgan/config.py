"""Configuration of a BigVGAN vocoder, which is read from the public `config.json` as data.

The configuration is validated here, once, before any weight is read. All other code relies on valid
values.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from token2wav.config.hyperyaml import HyperYaml, ModelNode
from token2wav.config.transformers_json import read_json
from token2wav.config.values import Bounds, check_bounds, convert, from_mapping, prefixed, shown
from token2wav.errors import CheckpointError, ConfigError
from token2wav.networks.configs import Dilations, Kernels, MelSettings, Rates, SampleRate, Width

CONFIG_FILE = "config.json"
# Names of files with the weights, in order of preference.
GENERATOR_FILES = ("generator.safetensors", "bigvgan_generator.pt", "generator.pt")


@dataclass(frozen=True)
class BigVGANConfig:
    """Configuration of BigVGAN v1 or v2.

    Fields have the public names. Fields that a file may omit have the public defaults.
    """

    resblock: Literal["1", "2"]
    upsample_rates: Rates
    upsample_kernel_sizes: Kernels
    upsample_initial_channel: Width
    resblock_kernel_sizes: Kernels
    resblock_dilation_sizes: Dilations
    activation: Literal["snake", "snakebeta"]
    snake_logscale: bool
    num_mels: Width
    hop_size: Annotated[int, Bounds(1, 1 << 16)]
    sampling_rate: SampleRate
    use_tanh_at_final: bool = True
    use_bias_at_final: bool = True

    def __post_init__(self) -> None:
        check_bounds(self, "BigVGAN")
        for name in ("upsample_rates", "upsample_kernel_sizes", "resblock_kernel_sizes"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: empty; at least 1 is needed")
        for index, dilations in enumerate(self.resblock_dilation_sizes):
            if not dilations:
                raise ConfigError(f"resblock_dilation_sizes[{index}]: empty; at least 1 is needed")
        for name, partner in (
            ("upsample_kernel_sizes", "upsample_rates"),
            ("resblock_dilation_sizes", "resblock_kernel_sizes"),
        ):
            if (count := len(getattr(self, name))) != (expected := len(getattr(self, partner))):
                raise ConfigError(f"{name}: {count} entries, but {partner} has {expected} entries")
        for index, kernel in enumerate(self.resblock_kernel_sizes):
            if kernel % 2 == 0:
                raise ConfigError(
                    f"resblock_kernel_sizes[{index}]: {kernel} is even; only odd kernels keep the "
                    f"length"
                )
        for index, (kernel, rate) in enumerate(
            zip(self.upsample_kernel_sizes, self.upsample_rates, strict=True)
        ):
            if kernel < rate or (kernel - rate) % 2:
                raise ConfigError(
                    f"upsample_kernel_sizes[{index}]: {kernel} must equal the rate {rate} "
                    f"or exceed it by an even number, so that a stage makes {rate} samples "
                    "of each sample"
                )
        if not self.upsample_initial_channel >> (stages := len(self.upsample_rates)):
            raise ConfigError(
                f"upsample_initial_channel: {self.upsample_initial_channel} is too small "
                f"for {stages} stages, which halve it each; at least {1 << stages} channels "
                "are needed"
            )
        if (product := math.prod(self.upsample_rates)) != self.hop_size:
            raise ConfigError(
                f"hop_size: {self.hop_size}, but upsample_rates give {product} samples per frame"
            )

    @property
    def mel(self) -> MelSettings:
        return MelSettings(self.sampling_rate, self.hop_size, self.num_mels)


def read_bigvgan(folder: Path) -> BigVGANConfig:
    """Reads `config.json` of a BigVGAN folder. Settings that only training uses are skipped.

    Raises:
        ConfigError: the file does not exist or is no JSON, or a key is missing, of another type or
            out of range.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{folder}: not a BigVGAN folder, {CONFIG_FILE} cannot be read")
    document = read_json(path)
    with prefixed(f"{path}: "):
        return _config_from(document)


def generator_file(folder: Path) -> Path:
    """Finds the file of the weights in a BigVGAN folder.

    Raises:
        CheckpointError: the folder has no such file.
    """
    for name in GENERATOR_FILES:
        if (path := folder / name).is_file():
            return path
    raise CheckpointError(f"{folder}: contains none of {', '.join(GENERATOR_FILES)}")


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

    Raises:
        ConfigError: the section cannot be used, or the vocoder was made for another kind of mel
            than the flow makes.
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
    sample_rate = convert(document.resolve("sample_rate"), SampleRate, "sample_rate")
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
    """Compares the mel settings of a vocoder with the mel settings of a flow.

    Raises:
        ConfigError: the settings differ. The message names every difference.
    """
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


def _config_from(document: dict[str, Any]) -> BigVGANConfig:
    fields = dataclasses.fields(BigVGANConfig)
    for field in fields:
        if field.name not in document and field.default is dataclasses.MISSING:
            raise ConfigError(f"{field.name}: missing")
    return from_mapping(
        BigVGANConfig,
        {field.name: document[field.name] for field in fields if field.name in document},
        "",
    )
