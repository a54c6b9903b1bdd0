"""Configuration of CosyVoice3 models, which is read from `cosyvoice3.yaml` as data.

It is validated here, once, before any weight is read; the rest of the code trusts it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from token2wav.config.hyperyaml import HyperYaml, ModelNode
from token2wav.config.values import all_positive, from_mapping
from token2wav.errors import ConfigError
from token2wav.families import read_config
from token2wav.families.bigvgan.config import BigVGANConfig, generator_file, vocoder_from
from token2wav.model_config import ModelConfig, Stem
from token2wav.networks.configs import CodebookConfig, EstimatorConfig, HiFTConfig, ScheduleConfig

MODEL_FILE = "cosyvoice3.yaml"

VocoderConfig = HiFTConfig | BigVGANConfig


@dataclass(frozen=True)
class FlowConfig:
    """Configuration of the flow, which turns tokens into mel."""

    vocab_size: int
    input_size: int
    spk_embed_dim: int
    token_mel_ratio: int
    pre_lookahead_len: int
    pre_lookahead_channels: int
    inference_cfg_rate: float
    estimator: EstimatorConfig
    n_timesteps: int = 10  # this and the next are fixed in the public code, not in its YAML
    lookbehind_len: int = 2
    codebooks: CodebookConfig | None = None

    ZERO_TOO: ClassVar[tuple[str, ...]] = ("inference_cfg_rate",)  # numbers that need not be positive

    def __post_init__(self) -> None:
        all_positive(self, "flow", self.ZERO_TOO)
        if self.codebooks and self.codebooks.merge == "concat" and self.input_size % self.codebooks.count:
            raise ConfigError(
                f"flow.input_size: {self.input_size} is not a multiple of {self.codebooks.count}, the codebooks whose "
                "embeddings are concatenated"
            )
        if self.input_size != self.estimator.mu_dim:
            raise ConfigError(
                f"flow.input_size: {self.input_size} is not the estimator's mu_dim {self.estimator.mu_dim}"
            )
        if self.estimator.static_chunk_size % self.token_mel_ratio:
            raise ConfigError(
                f"flow.decoder.estimator.static_chunk_size: {self.estimator.static_chunk_size} frames are not a "
                f"whole number of tokens of {self.token_mel_ratio} frames"
            )

    @property
    def context_tokens(self) -> tuple[int, int]:
        """Tokens before a chunk that it is given along, and those after it that must be there before it can run."""
        return self.lookbehind_len, self.pre_lookahead_len

    @property
    def hop_blocks(self) -> tuple[int, int]:
        """Blocks of the first and of the longest hop; 4 of 25 tokens are 4 s."""
        return 1, 4

    @property
    def mel_bands(self) -> int:
        return self.estimator.mel_dim

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of one token: () for a number, (codebooks,) for several codes."""
        return (self.codebooks.count,) if self.codebooks else ()

    @property
    def block_tokens(self) -> int:
        """Tokens in one attention block: every chunk must end on a multiple of it."""
        return self.estimator.static_chunk_size // self.token_mel_ratio


@dataclass(frozen=True, kw_only=True)
class CosyVoice3Config(ModelConfig):
    """Configuration of a model in CosyVoice3's format; it checks that flow and vocoder fit each other.

    Attributes:
        flow: sizes of the network from tokens to mel.
        vocoder: sizes of the network from mel to audio; the class says which one it is.
        vocoder_folder: folder below the model folder in which a BigVGAN lies.
        schedule: times at which the flow's ODE is evaluated.
    """

    FILE: ClassVar[str] = MODEL_FILE

    speaks_early: bool = True
    flow: FlowConfig
    vocoder: VocoderConfig
    vocoder_folder: str = ""
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)

    @classmethod
    def of(
        cls,
        flow: FlowConfig,
        vocoder: VocoderConfig,
        token_frame_rate: float,
        vocoder_folder: str = "",
        schedule: ScheduleConfig = ScheduleConfig(),  # noqa: B008 (it is frozen)
    ) -> CosyVoice3Config:
        """Makes the configuration of a flow and a vocoder.

        Raises:
            ConfigError: they do not fit each other.
        """
        lookbehind, lookahead = flow.context_tokens
        return cls(
            vocab_size=flow.vocab_size,
            token_shape=flow.token_shape,
            token_frame_rate=token_frame_rate,
            block_tokens=flow.block_tokens,
            lookahead_tokens=lookahead,
            lookbehind_tokens=lookbehind,
            token_mel_ratio=flow.token_mel_ratio,
            mel_bands=flow.mel_bands,
            speaker_size=flow.spk_embed_dim,
            sample_rate=vocoder.mel.sample_rate_hz,
            samples_per_token=flow.token_mel_ratio * vocoder.mel.hop_samples,
            hop_blocks=flow.hop_blocks,
            ode_steps=flow.n_timesteps,
            fixed_steps=bool(schedule.times),
            flow=flow,
            vocoder=vocoder,
            vocoder_folder=vocoder_folder,
            schedule=schedule,
        )

    def __post_init__(self) -> None:
        if self.token_frame_rate <= 0:
            raise ConfigError(f"model.token_frame_rate: {self.token_frame_rate:g} is not positive")
        if self.mel_bands != self.vocoder.mel.bands:
            raise ConfigError(
                f"hift.in_channels: {self.vocoder.mel.bands} mel bands, but the flow makes {self.mel_bands}"
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

    @classmethod
    def read(cls, folder: Path) -> CosyVoice3Config:
        """Reads the model file of a folder, and `config.json` of its BigVGAN if it has one.

        Raises:
            ConfigError: a key that is missing, of another class or out of range.
        """
        path = folder / cls.FILE
        document = HyperYaml.read(path)
        try:
            return cls._from(document, folder)
        except ConfigError as error:
            message = str(error)
            raise ConfigError(message if message.startswith(str(folder)) else f"{path}: {message}") from error

    @classmethod
    def _from(cls, document: HyperYaml, folder: Path) -> CosyVoice3Config:
        flow, token_frame_rate, schedule = cls._flow_from(document)
        if "vocoder" not in document:
            return cls.of(flow, hift_from(document), token_frame_rate, schedule=schedule)
        mel = token_frame_rate, flow.token_mel_ratio, flow.mel_bands
        vocoder, vocoder_folder = vocoder_from(document, folder, *mel)
        return cls.of(flow, vocoder, token_frame_rate, vocoder_folder, schedule)

    @classmethod
    def _flow_from(cls, document: HyperYaml) -> tuple[FlowConfig, float, ScheduleConfig]:
        """Reads the flow, the tokens per second that it takes, and the times of its ODE."""
        flow = ModelNode.of(document.resolve("flow"), "flow", "CausalMaskedDiffWithDiT")
        lookahead = flow.child("pre_lookahead_layer", "PreLookaheadLayer")
        if (length := lookahead.get("pre_lookahead_len", int)) != (outer := flow.get("pre_lookahead_len", int)):
            raise ConfigError(f"{lookahead.name}.pre_lookahead_len: {length}, but flow.pre_lookahead_len is {outer}")
        decoder = flow.child("decoder", "CausalConditionalCFM")
        solver = decoder.child("cfm_params", "DictConfig").child("content")
        if (method := solver.get("solver", str)) != "euler":
            raise ConfigError(f"{solver.name}.solver: only 'euler' is supported, got '{method}'")
        schedule = _schedule_from(solver)
        steps = len(schedule.times) - 1 if schedule.times else solver.get_or("n_timesteps", int, FlowConfig.n_timesteps)
        estimator = decoder.child("estimator", "DiT")
        rate = flow.get("input_frame_rate", float)
        config = FlowConfig(
            **flow.fields(
                FlowConfig, "vocab_size", "input_size", "spk_embed_dim", "token_mel_ratio", "pre_lookahead_len"
            ),
            pre_lookahead_channels=lookahead.get("channels", int),
            inference_cfg_rate=solver.get("inference_cfg_rate", float),
            estimator=EstimatorConfig(**estimator.fields(EstimatorConfig, but=("guided",))),
            n_timesteps=steps,
            codebooks=_codebooks_from(flow) if "codebooks" in flow.data else None,
        )
        return config, as_integer(rate), schedule

    def part(self, stem: Stem) -> Any:
        return self.flow if stem == "flow" else self.vocoder

    def weights_file(self, folder: Path, stem: Stem) -> Path:
        if stem == "hift" and isinstance(self.vocoder, BigVGANConfig):
            return generator_file(folder / self.vocoder_folder)
        return super().weights_file(folder, stem)


def read_cosyvoice3(folder: Path) -> CosyVoice3Config:
    """Reads a model whose flow is CosyVoice3's, whichever family its folder is of.

    Raises:
        ConfigError: it is another model, or a value in its files cannot be used.
    """
    config = read_config(folder)
    if not isinstance(config, CosyVoice3Config):
        raise ConfigError(f"{folder}: its flow is not that of CosyVoice3 or StreamFlow")
    return config


def as_integer(rate: float) -> float:
    """Returns a rate as an integer if it is one, so that hashes of configurations do not depend on its spelling."""
    return int(rate) if rate.is_integer() else rate


def _codebooks_from(flow: ModelNode) -> CodebookConfig:
    codebooks = flow.child("codebooks")
    codebooks.get("count", int)  # it has no default
    config: CodebookConfig = from_mapping(CodebookConfig, codebooks.data, codebooks.name)
    return config


def _schedule_from(solver: ModelNode) -> ScheduleConfig:
    kind, times = solver.get("t_scheduler", Literal["cosine", "linear"]), solver.get_or("times", tuple[float, ...], ())
    try:
        return ScheduleConfig(kind, times)
    except ConfigError as error:
        raise ConfigError(f"{solver.name}.{error}") from error


def hift_from(document: HyperYaml, *, causal: bool = True) -> HiFTConfig:
    """Reads the vocoder, CosyVoice3's or the symmetric one of generations before it."""
    kind = "Causal" if causal else ""
    hift = ModelNode.of(document.resolve("hift"), "hift", f"{kind}HiFTGenerator")
    istft = hift.child("istft_params")
    f0 = hift.child("f0_predictor", f"{kind}ConvRNNF0Predictor")
    elsewhere = ["n_fft", "hop_len", "f0_channels", "causal"]
    return HiFTConfig(
        **hift.fields(HiFTConfig, but=elsewhere if causal else [*elsewhere, "conv_pre_look_right"]),
        **istft.fields(HiFTConfig, "n_fft", "hop_len"),
        f0_channels=f0.get("cond_channels", int),
        causal=causal,
    )
