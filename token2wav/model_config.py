"""Configuration of a model, typed and frozen, which is read from its `cosyvoice3.yaml` as data.

It is validated here, once, before any weight is read; the rest of the code trusts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from token2wav.config.hyperyaml import HyperYaml
from token2wav.config.model_node import ModelNode
from token2wav.config.values import all_positive, convert, shown
from token2wav.errors import ConfigError
from token2wav.families.bigvgan.config import check_mel, read_bigvgan
from token2wav.families.cosyvoice3.config import FlowConfig
from token2wav.families.cosyvoice3.sections import flow_from, hift_from, streamflow_from
from token2wav.families.streamflow.config import STREAMFLOW_FILE
from token2wav.model_folder import Stem, generator_file, weights_file
from token2wav.networks.configs import BigVGANConfig, HiFTConfig, MelSettings, ScheduleConfig

MODEL_FILE = "cosyvoice3.yaml"

VocoderConfig = HiFTConfig | BigVGANConfig


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of one model in CosyVoice3's format; it checks that flow and vocoder fit each other.

    Attributes:
        flow: sizes of the network from tokens to mel.
        vocoder: sizes of the network from mel to audio; the class says which one it is.
        token_frame_rate: tokens per second.
        vocoder_folder: folder below the model folder in which a BigVGAN lies.
        schedule: times at which the flow's ODE is evaluated.
    """

    flow: FlowConfig
    vocoder: VocoderConfig
    token_frame_rate: float
    vocoder_folder: str = ""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        all_positive(self, "model")
        if self.flow.mel_bands != self.vocoder.mel.bands:
            raise ConfigError(
                f"hift.in_channels: {self.vocoder.mel.bands} mel bands, but the flow makes {self.flow.mel_bands}"
            )
        # Rates such as 22050 / 512 have no end as decimals.
        if not math.isclose(self.token_frame_rate * self.samples_per_token, self.sample_rate, rel_tol=1e-6):
            raise ConfigError(
                f"sample_rate: {self.token_frame_rate:g} tokens per second of {self.samples_per_token} samples do not "
                f"make {self.sample_rate} Hz"
            )

    @property
    def hift(self) -> HiFTConfig:
        """Configuration of the vocoder, where it is a HiFT.

        Raises:
            ConfigError: it is another one.
        """
        if not isinstance(self.vocoder, HiFTConfig):
            raise ConfigError("hift: the model has another vocoder")
        return self.vocoder

    @property
    def sample_rate(self) -> int:
        return self.vocoder.mel.sample_rate_hz

    @property
    def samples_per_token(self) -> int:
        return self.flow.token_mel_ratio * self.vocoder.mel.hop_samples

    @property
    def block_seconds(self) -> float:
        """Duration of the audio of one attention block."""
        return self.flow.block_tokens / self.token_frame_rate

    def allowed_steps(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the numbers of ODE steps that streams may have, the usual one first.

        Args:
            wanted: setting `StreamConfig.steps`.

        Raises:
            ConfigError: the model was distilled for another number.
        """
        own = self.flow.n_timesteps
        if self.schedule.times and wanted not in ((), (own,)):
            raise ConfigError(
                f"stream.steps: {', '.join(map(str, wanted))}, but the model has a list of times, for {own} steps only"
            )
        return wanted or (own,)

    def weights_file(self, folder: Path, stem: Stem) -> Path:
        """Finds the weights of a stage in a folder of this model; `hift` stands for the vocoder, whichever it is.

        Raises:
            CheckpointError: there are none.
        """
        if stem == "hift" and isinstance(self.vocoder, BigVGANConfig):
            return generator_file(folder / self.vocoder_folder)
        return weights_file(folder, stem)

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """Reads `cosyvoice3.yaml` or `streamflow.yaml` of a folder, and `config.json` of its BigVGAN if it has one.

        Raises:
            ConfigError: no such folder or file, or a key that is missing, of another class or out of range.
        """
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such model folder")
        path = next((folder / name for name in (MODEL_FILE, STREAMFLOW_FILE) if (folder / name).is_file()), None)
        if path is None:
            raise ConfigError(
                f"{folder}: not a CosyVoice3 model folder, {MODEL_FILE} is missing; nor a StreamFlow one, with "
                f"{STREAMFLOW_FILE}"
            )
        document = HyperYaml.read(path)
        try:
            return _model_from(document, folder, streamflow=path.name == STREAMFLOW_FILE)
        except ConfigError as error:
            message = str(error)
            raise ConfigError(message if message.startswith(str(folder)) else f"{path}: {message}") from error


def _model_from(document: HyperYaml, folder: Path, *, streamflow: bool) -> ModelConfig:
    flow, token_frame_rate, schedule = streamflow_from(document) if streamflow else flow_from(document)
    if "vocoder" not in document:
        return ModelConfig(flow, hift_from(document), token_frame_rate, schedule=schedule)
    section = ModelNode.of(document.resolve("vocoder"), "vocoder")
    if unknown := [str(key) for key in section.data if key not in ("type", "folder")]:
        raise ConfigError(f"vocoder: unknown key {shown(unknown[0])}; known are type, folder")
    if (kind := section.get("type", str)) != "bigvgan":
        raise ConfigError(f"vocoder.type: {shown(kind)} is not bigvgan; for HiFT leave the section vocoder out")
    vocoder_folder = section.get_or("folder", str, ".")
    if (path := PurePosixPath(vocoder_folder)).is_absolute() or ".." in path.parts:
        raise ConfigError(f"vocoder.folder: {shown(vocoder_folder)} is not a folder below the model folder")
    vocoder = read_bigvgan(folder / vocoder_folder)
    check_mel(vocoder, _flow_mel(flow, token_frame_rate, convert(document.resolve("sample_rate"), int, "sample_rate")))
    return ModelConfig(flow, vocoder, token_frame_rate, vocoder_folder, schedule)


def _flow_mel(flow: FlowConfig, token_frame_rate: float, sample_rate_hz: int) -> MelSettings:
    """Returns the settings of the mel that a flow makes for audio of a sample rate."""
    if token_frame_rate <= 0:
        raise ConfigError(f"flow.input_frame_rate: {token_frame_rate:g} is not positive")
    hop = sample_rate_hz / (token_frame_rate * flow.token_mel_ratio)
    if not math.isclose(hop, round(hop), rel_tol=1e-6):
        raise ConfigError(
            f"sample_rate: {sample_rate_hz} Hz give {hop:.2f} samples to each of {token_frame_rate:g} x "
            f"{flow.token_mel_ratio} mel frames per second, which must be a whole number"
        )
    return MelSettings(sample_rate_hz, round(hop), flow.mel_bands)
