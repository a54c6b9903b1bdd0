"""Typed, frozen configuration of a model, read from its `cosyvoice3.yaml` as data.

It is validated here, once, before any weight is read; the rest of the code trusts it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from token2wav.bigvgan_config import BigVGANConfig, MelSettings, check_mel
from token2wav.config import StreamConfig
from token2wav.config_values import all_positive, convert, from_mapping, shown
from token2wav.errors import ConfigError
from token2wav.guided_attention import GuidedAttention
from token2wav.hyperyaml import HyperYaml, Tagged
from token2wav.model_folder import Stem, generator_file, weights_file
from token2wav.streamflow_config import STREAMFLOW_FILE, StreamFlowSection

MODEL_FILE = "cosyvoice3.yaml"
_LONGEST_HOP_BLOCKS = 4  # of 25 tokens: 4 s
_TOKEN_CONVOLUTIONS = ("pre_lookahead_len", "pre_lookahead_channels", "lookbehind_len")


@dataclass(frozen=True)
class EstimatorConfig:
    """The DiT. Field names are those of `cosyvoice3.yaml`."""

    dim: int
    depth: int
    heads: int
    dim_head: int
    ff_mult: int
    mel_dim: int
    mu_dim: int
    spk_dim: int
    out_channels: int
    static_chunk_size: int
    guided: GuidedAttention | None = None  # masks of the layers; None: all see their own block and all before it

    def __post_init__(self) -> None:
        all_positive(self, "flow.decoder.estimator")
        if self.dim % 16:
            raise ConfigError(f"flow.decoder.estimator.dim: {self.dim} is not a multiple of 16, the convolution groups")
        if self.dim_head % 2:
            raise ConfigError(f"flow.decoder.estimator.dim_head: {self.dim_head} is odd; rotary positions need pairs")
        if not self.mel_dim == self.mu_dim == self.out_channels == self.spk_dim:
            raise ConfigError(
                "flow.decoder.estimator: mel_dim, mu_dim, spk_dim and out_channels must be equal, got "
                f"{self.mel_dim}, {self.mu_dim}, {self.spk_dim}, {self.out_channels}"
            )


@dataclass(frozen=True)
class ScheduleConfig:
    """At which times the ODE is evaluated.

    Attributes:
        kind: `cosine` takes small steps at first, `linear` equal ones; public names.
        times: of a distilled model, from 0 to 1, instead: the start of every step, and the end of the last.
    """

    kind: Literal["cosine", "linear"] = "cosine"
    times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.times:
            return
        if len(self.times) < 2 or (self.times[0], self.times[-1]) != (0, 1):
            raise ConfigError(f"times: {len(self.times)} of them; they start with 0 and end with 1")
        for index, (before, after) in enumerate(pairwise(self.times), start=1):
            if after <= before:
                raise ConfigError(f"times[{index}]: {after:g} does not come after {before:g}")


@dataclass(frozen=True)
class CodebookConfig:
    """Tokens of several codes each.

    Attributes:
        count: codes of a token, each from a vocabulary of its own.
        merge: of their embeddings: `sum`, or `concat` one behind the other, each as wide as its share.
    """

    count: int
    merge: Literal["sum", "concat"] = "sum"

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ConfigError(f"flow.codebooks.count: {self.count} is below 2; for one code leave codebooks out")


@dataclass(frozen=True)
class FlowConfig:
    """Tokens to mel."""

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
    chunk_blocks: int | None = None  # of a first chunk, where the service doesn't say; None: 1
    window_evaluations: int | None = None  # that a guided chunk's window reaches through; None: 1
    codebooks: CodebookConfig | None = None

    def __post_init__(self) -> None:
        zero_too = ("inference_cfg_rate", *(_TOKEN_CONVOLUTIONS if self.guided else ()))
        all_positive(self, "flow", zero_too)
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
    def guided(self) -> GuidedAttention | None:
        return self.estimator.guided

    @property
    def lookahead_tokens(self) -> int:
        """Tokens after a chunk that it depends on and that must be there before it can run."""
        if self.guided is None:
            return self.pre_lookahead_len
        return self.guided.future_blocks * (self.window_evaluations or 1) * self.block_tokens

    @property
    def lookbehind_tokens(self) -> int:
        """Tokens before a chunk that it is given along."""
        if self.guided is None:
            return self.lookbehind_len
        return self.guided.past_blocks * (self.window_evaluations or 1) * self.block_tokens

    @property
    def mel_bands(self) -> int:
        return self.estimator.mel_dim

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Of one token: () for a number, (codebooks,) for several codes."""
        return (self.codebooks.count,) if self.codebooks else ()

    @property
    def block_tokens(self) -> int:
        """Tokens in one attention block: every chunk must end on a multiple of it."""
        return self.estimator.static_chunk_size // self.token_mel_ratio

    def hops(self, stream: StreamConfig) -> tuple[int, int]:
        """Tokens of the first and of the longest hop: what the service says, or else what suits the model."""
        first = stream.hop_tokens or (self.chunk_blocks or 1) * self.block_tokens
        growth = 1 if self.guided else _LONGEST_HOP_BLOCKS
        return first, stream.max_hop_tokens or max(first, growth * self.block_tokens)

    def served(self, stream: StreamConfig) -> FlowConfig:
        """See `ModelConfig.served`."""
        if self.guided is not None:
            return self._guided_served(stream)
        if stream.reach != "evaluation":
            raise ConfigError(f"stream.reach: '{stream.reach}' is for models with guided attention, which this is not")
        if not stream.block_tokens:
            return self
        frames = stream.block_tokens * self.token_mel_ratio
        return dataclasses.replace(self, estimator=dataclasses.replace(self.estimator, static_chunk_size=frames))

    def _guided_served(self, stream: StreamConfig) -> FlowConfig:
        default = StreamConfig()
        for key in ("block_tokens", "left_blocks", "tail", "align_prompt"):
            if (value := getattr(stream, key)) != getattr(default, key):
                raise ConfigError(
                    f"stream.{key}: {value} does not go with guided attention, whose layers say who sees whom"
                )
        first, longest = self.hops(stream)
        if stream.hop == "lead" and longest > first and stream.reach == "evaluation":
            raise ConfigError(
                "stream.hop: lead would make the audio depend on time, because the windows of chunks do; take fixed or "
                "growing, or reach: solution"
            )
        evaluations = max(stream.steps, default=self.n_timesteps) if stream.reach == "solution" else 1
        return dataclasses.replace(self, window_evaluations=evaluations)

    def prefix_tokens(self, prompt_tokens: int) -> int:
        """Tokens of the blocks that lie wholly in a prompt, look-ahead included: they depend on the voice alone."""
        return max(0, prompt_tokens - self.lookahead_tokens) // self.block_tokens * self.block_tokens


@dataclass(frozen=True)
class HiFTConfig:
    """Mel to audio: CosyVoice3's causal HiFT."""

    in_channels: int
    base_channels: int
    nb_harmonics: int
    sampling_rate: int
    nsf_alpha: float
    nsf_sigma: float
    nsf_voiced_threshold: float
    upsample_rates: tuple[int, ...]
    upsample_kernel_sizes: tuple[int, ...]
    n_fft: int
    hop_len: int
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilation_sizes: tuple[tuple[int, ...], ...]
    source_resblock_kernel_sizes: tuple[int, ...]
    source_resblock_dilation_sizes: tuple[tuple[int, ...], ...]
    lrelu_slope: float
    audio_limit: float
    conv_pre_look_right: int
    f0_channels: int

    def __post_init__(self) -> None:
        all_positive(self, "hift")
        stages = len(self.upsample_rates)
        for name in ("upsample_rates", "resblock_kernel_sizes"):
            if not getattr(self, name):
                raise ConfigError(f"hift.{name}: empty; at least 1 is needed")
        if not len(self.upsample_kernel_sizes) == len(self.source_resblock_kernel_sizes) == stages:
            raise ConfigError(
                "hift: upsample_rates, upsample_kernel_sizes and source_resblock_kernel_sizes differ in length"
            )
        if len(self.source_resblock_dilation_sizes) != stages:
            raise ConfigError("hift: source_resblock_dilation_sizes needs one list per upsampling stage")
        if len(self.resblock_dilation_sizes) != len(self.resblock_kernel_sizes):
            raise ConfigError("hift: resblock_dilation_sizes needs one list per resblock kernel size")
        if self.base_channels % 2**stages:
            raise ConfigError(f"hift.base_channels: {self.base_channels} cannot be halved {stages} times")
        if self.n_fft % 2 or self.n_fft < 2 * self.hop_len:
            raise ConfigError(
                f"hift.istft_params: n_fft {self.n_fft} must be even and at least twice hop_len {self.hop_len}"
            )

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.upsample_rates) * self.hop_len

    @property
    def mel(self) -> MelSettings:
        return MelSettings(self.sampling_rate, self.samples_per_frame, self.in_channels)


VocoderConfig = HiFTConfig | BigVGANConfig


@dataclass(frozen=True)
class ModelConfig:
    """One CosyVoice3-format model.

    Attributes:
        flow: tokens to mel.
        vocoder: mel to audio; its class says which one it is.
        token_frame_rate: tokens per second.
        vocoder_folder: below the model folder, where a BigVGAN lies.
        schedule: of the flow's ODE.
    """

    flow: FlowConfig
    vocoder: VocoderConfig
    token_frame_rate: float
    vocoder_folder: str = ""
    schedule: ScheduleConfig = ScheduleConfig()

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
        """The vocoder, where it is a HiFT.

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
        """Audio of one attention block."""
        return self.flow.block_tokens / self.token_frame_rate

    def allowed_steps(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of ODE steps that streams may have, the usual one first.

        Args:
            wanted: see `StreamConfig.steps`.

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
        """The weights of a stage in a folder of this model; `hift` stands for the vocoder, whichever it is.

        Raises:
            CheckpointError: there are none.
        """
        if stem == "hift" and isinstance(self.vocoder, BigVGANConfig):
            return generator_file(folder / self.vocoder_folder)
        return weights_file(folder, stem)

    def served(self, stream: StreamConfig) -> ModelConfig:
        """The model as a service uses it: with another attention block, or another reach, if it says so.

        Raises:
            ConfigError: it says what does not go with the attention of the model.
        """
        if self.flow.guided is not None:  # it looks at hops
            stream = stream.in_tokens(self.token_frame_rate, self.flow.block_tokens)
        return dataclasses.replace(self, flow=self.flow.served(stream))

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
    flow, token_frame_rate, schedule = _streamflow_from(document) if streamflow else _flow_from(document)
    if "vocoder" not in document:
        return ModelConfig(flow, _hift_from(document), token_frame_rate, schedule=schedule)
    section = _Node.of(document.resolve("vocoder"), "vocoder")
    if unknown := [str(key) for key in section.data if key not in ("type", "folder")]:
        raise ConfigError(f"vocoder: unknown key {shown(unknown[0])}; known are type, folder")
    if (kind := section.get("type", str)) != "bigvgan":
        raise ConfigError(f"vocoder.type: {shown(kind)} is not bigvgan; for HiFT leave the section vocoder out")
    vocoder_folder = section.get_or("folder", str, ".")
    if (path := PurePosixPath(vocoder_folder)).is_absolute() or ".." in path.parts:
        raise ConfigError(f"vocoder.folder: {shown(vocoder_folder)} is not a folder below the model folder")
    vocoder = BigVGANConfig.read(folder / vocoder_folder)
    check_mel(vocoder, _flow_mel(flow, token_frame_rate, convert(document.resolve("sample_rate"), int, "sample_rate")))
    return ModelConfig(flow, vocoder, token_frame_rate, vocoder_folder, schedule)


def _flow_mel(flow: FlowConfig, token_frame_rate: float, sample_rate_hz: int) -> MelSettings:
    """The mel that a flow makes for audio of a sample rate."""
    if token_frame_rate <= 0:
        raise ConfigError(f"flow.input_frame_rate: {token_frame_rate:g} is not positive")
    hop = sample_rate_hz / (token_frame_rate * flow.token_mel_ratio)
    if not math.isclose(hop, round(hop), rel_tol=1e-6):
        raise ConfigError(
            f"sample_rate: {sample_rate_hz} Hz give {hop:.2f} samples to each of {token_frame_rate:g} x "
            f"{flow.token_mel_ratio} mel frames per second, which must be a whole number"
        )
    return MelSettings(sample_rate_hz, round(hop), flow.mel_bands)


def _flow_from(document: HyperYaml) -> tuple[FlowConfig, float, ScheduleConfig]:
    """The flow, the tokens per second that it takes, and the times of its ODE."""
    flow = _Node.of(document.resolve("flow"), "flow", "CausalMaskedDiffWithDiT")
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
        **flow.fields("vocab_size", "input_size", "spk_embed_dim", "token_mel_ratio", "pre_lookahead_len", kind=int),
        pre_lookahead_channels=lookahead.get("channels", int),
        inference_cfg_rate=solver.get("inference_cfg_rate", float),
        estimator=EstimatorConfig(
            **estimator.fields(*(f.name for f in dataclasses.fields(EstimatorConfig) if f.name != "guided"), kind=int)
        ),
        n_timesteps=steps,
        codebooks=_codebooks_from(flow) if "codebooks" in flow.data else None,
    )
    return config, _as_integer(rate), schedule


def _streamflow_from(document: HyperYaml) -> tuple[FlowConfig, float, ScheduleConfig]:
    """As `_flow_from`, of a `streamflow.yaml`."""
    section = StreamFlowSection.of(document.resolve("flow"))
    try:
        schedule = ScheduleConfig(section.t_scheduler, section.times)
    except ConfigError as error:
        raise ConfigError(f"flow.{error}") from error
    bands = section.mel_bands
    config = FlowConfig(
        vocab_size=section.vocab_size,
        input_size=bands,
        spk_embed_dim=section.spk_embed_dim,
        token_mel_ratio=section.token_mel_ratio,
        pre_lookahead_len=0,
        pre_lookahead_channels=0,
        inference_cfg_rate=section.inference_cfg_rate,
        estimator=EstimatorConfig(
            **{name: getattr(section, name) for name in ("dim", "depth", "heads", "dim_head", "ff_mult")},
            **dict.fromkeys(("mel_dim", "mu_dim", "spk_dim", "out_channels"), bands),
            static_chunk_size=section.block_frames,
            guided=section.attention(),
        ),
        n_timesteps=len(schedule.times) - 1 if schedule.times else section.n_timesteps,
        lookbehind_len=0,
        chunk_blocks=section.chunk_blocks,
    )
    return config, _as_integer(section.input_frame_rate), schedule


def _as_integer(rate: float) -> float:
    return int(rate) if rate.is_integer() else rate


def _codebooks_from(flow: _Node) -> CodebookConfig:
    codebooks = flow.child("codebooks")
    codebooks.get("count", int)  # it has no default
    config: CodebookConfig = from_mapping(CodebookConfig, codebooks.data, codebooks.name)
    return config


def _schedule_from(solver: _Node) -> ScheduleConfig:
    kind, times = solver.get("t_scheduler", Literal["cosine", "linear"]), solver.get_or("times", tuple[float, ...], ())
    try:
        return ScheduleConfig(kind, times)
    except ConfigError as error:
        raise ConfigError(f"{solver.name}.{error}") from error


def _hift_from(document: HyperYaml) -> HiFTConfig:
    hift = _Node.of(document.resolve("hift"), "hift", "CausalHiFTGenerator")
    istft = hift.child("istft_params")
    f0 = hift.child("f0_predictor", "CausalConvRNNF0Predictor")
    return HiFTConfig(
        **hift.fields("in_channels", "base_channels", "nb_harmonics", "sampling_rate", "conv_pre_look_right", kind=int),
        **hift.fields("nsf_alpha", "nsf_sigma", "nsf_voiced_threshold", "lrelu_slope", "audio_limit", kind=float),
        **hift.fields(
            "upsample_rates",
            "upsample_kernel_sizes",
            "resblock_kernel_sizes",
            "source_resblock_kernel_sizes",
            kind=tuple[int, ...],
        ),
        **hift.fields("resblock_dilation_sizes", "source_resblock_dilation_sizes", kind=tuple[tuple[int, ...], ...]),
        **istft.fields("n_fft", "hop_len", kind=int),
        f0_channels=f0.get("cond_channels", int),
    )


@dataclass(frozen=True)
class _Node:
    """A mapping of the model file, with the path of keys that leads to it for messages."""

    name: str
    data: dict[str, Any]

    @classmethod
    def of(cls, value: Any, name: str, target: str | None = None) -> _Node:
        if target is not None:
            found = f"!{value.tag}:{value.target}" if isinstance(value, Tagged) else type(value).__name__
            if not isinstance(value, Tagged) or value.tag != "new" or value.target.rpartition(".")[2] != target:
                raise ConfigError(f"{name}: expected '!new:...{target}', got '{found}'")
            value = value.value
        if not isinstance(value, dict):
            raise ConfigError(f"{name}: expected a mapping, got {type(value).__name__}")
        return cls(name, value)

    def child(self, key: str, target: str | None = None) -> _Node:
        return _Node.of(self._value(key), f"{self.name}.{key}", target)

    def get(self, key: str, kind: Any) -> Any:
        return convert(self._value(key), kind, f"{self.name}.{key}")

    def get_or(self, key: str, kind: Any, default: Any) -> Any:
        return self.get(key, kind) if key in self.data else default

    def fields(self, *keys: str, kind: Any) -> dict[str, Any]:
        return {key: self.get(key, kind) for key in keys}

    def _value(self, key: str) -> Any:
        if key not in self.data:
            raise ConfigError(f"{self.name}.{key}: missing")
        return self.data[key]
