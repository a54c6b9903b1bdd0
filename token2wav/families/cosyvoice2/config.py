"""Configuration of CosyVoice2 models, which is read from `cosyvoice2.yaml`, or the older `cosyvoice.yaml`, as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from token2wav.config.hyperyaml import HyperYaml, ModelNode, Tagged
from token2wav.config.values import all_positive
from token2wav.errors import ConfigError
from token2wav.families.cosyvoice3.config import as_integer, hift_from
from token2wav.model_config import ModelConfig, Stem
from token2wav.networks.configs import HiFTConfig

FILES = ("cosyvoice2.yaml", "cosyvoice.yaml")
RATIO, LOOKBEHIND = 2, 2  # frames of a token, and tokens that the look-ahead layer reaches back: fixed in public code

_BLOCK_TOKENS = 25  # where a file does not say it
_UP_LAYERS = 4  # fixed in public code as well
_ENCODER_ALWAYS = {
    "input_layer": "linear",
    "pos_enc_layer_type": "rel_pos_espnet",
    "selfattention_layer_type": "rel_selfattn",
    "normalize_before": True,
    "use_cnn_module": False,
    "macaron_style": False,
}


@dataclass(frozen=True)
class EncoderConfig:
    """Configuration of the conformer encoder: channels, heads, channels of feed-forward, layers before and after x2."""

    size: int
    heads: int
    units: int
    layers: int
    up_layers: int = _UP_LAYERS

    def __post_init__(self) -> None:
        all_positive(self, "flow.encoder")
        if self.size % (2 * self.heads):
            raise ConfigError(
                f"flow.encoder.output_size: {self.size} is not a multiple of 2 x {self.heads}, the attention heads"
            )


@dataclass(frozen=True)
class UNetConfig:
    """Configuration of the estimator: channels, attention, blocks in the middle, transformer layers of each block."""

    channels: int
    heads: int
    dim_head: int
    mid_blocks: int
    layers: int

    def __post_init__(self) -> None:
        all_positive(self, "flow.decoder.estimator")


EstimatorT = TypeVar("EstimatorT")
ConfigT = TypeVar("ConfigT", bound="CosyVoice2Config")


@dataclass(frozen=True)
class FlowConfig(Generic[EstimatorT]):
    """Configuration of the flow, which turns tokens into mel; relatives of CosyVoice2 have another estimator."""

    vocab_size: int
    spk_embed_dim: int
    mel_bands: int
    pre_lookahead_len: int
    inference_cfg_rate: float
    encoder: EncoderConfig
    estimator: EstimatorT
    block_tokens: int = _BLOCK_TOKENS
    n_timesteps: int = 10

    def __post_init__(self) -> None:
        all_positive(self, "flow", zero_too=("inference_cfg_rate",))


@dataclass(frozen=True, kw_only=True)
class CosyVoice2Config(ModelConfig):
    """Configuration of a CosyVoice2 model, or of a relative.

    Attributes:
        flow: sizes of the network from tokens to mel.
        hift: sizes of the network from mel to audio.
    """

    speaks_early: bool = True
    flow: FlowConfig[Any]
    hift: HiFTConfig

    @classmethod
    def of(cls: type[ConfigT], flow: FlowConfig[Any], hift: HiFTConfig, token_frame_rate: float, **own: Any) -> ConfigT:
        """Makes the configuration of a flow and a vocoder.

        Args:
            flow, hift: of the model.
            token_frame_rate: tokens per second.
            own: what else a relative has.

        Raises:
            ConfigError: they do not fit each other.
        """
        if flow.mel_bands != hift.in_channels:
            raise ConfigError(f"hift.in_channels: {hift.in_channels} mel bands, but the flow makes {flow.mel_bands}")
        if token_frame_rate * RATIO * hift.samples_per_frame != hift.sampling_rate:
            raise ConfigError(
                f"flow.input_frame_rate: {token_frame_rate:g} tokens per second of {RATIO * hift.samples_per_frame} "
                f"samples do not make {hift.sampling_rate} Hz"
            )
        common = {
            "vocab_size": flow.vocab_size,
            "token_frame_rate": token_frame_rate,
            "block_tokens": flow.block_tokens,
            "lookahead_tokens": flow.pre_lookahead_len,
            "lookbehind_tokens": LOOKBEHIND,
            "token_mel_ratio": RATIO,
            "mel_bands": flow.mel_bands,
            "speaker_size": flow.spk_embed_dim,
            "sample_rate": hift.sampling_rate,
            "samples_per_token": RATIO * hift.samples_per_frame,
            "ode_steps": flow.n_timesteps,
        }
        return cls(**{**common, **own}, flow=flow, hift=hift)

    def part(self, stem: Stem) -> Any:
        return self.flow if stem == "flow" else self.hift


def read(folder: Path) -> CosyVoice2Config:
    """Reads the model file of a folder.

    Raises:
        ConfigError: a key that is missing, of another class or out of range.
    """
    path = next(folder / name for name in FILES if (folder / name).is_file())
    document = HyperYaml.read(path)
    try:
        flow, rate = _flow_from(document)
        return CosyVoice2Config.of(flow, hift_from(document, causal=False), rate)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _flow_from(document: HyperYaml) -> tuple[FlowConfig[UNetConfig], float]:
    """Reads the flow, and the tokens per second that it takes."""
    flow = ModelNode.of(document.resolve("flow"), "flow", "CausalMaskedDiffWithXvec")
    if (ratio := flow.get_or("token_mel_ratio", int, RATIO)) != RATIO:
        raise ConfigError(f"flow.token_mel_ratio: {ratio}, but the encoder makes {RATIO} frames of a token")
    encoder, block = _encoder_from(flow)
    decoder = flow.child("decoder", "CausalConditionalCFM")
    solver = decoder.child("cfm_params", "DictConfig").child("content")
    solver.get("solver", Literal["euler"])
    solver.get("t_scheduler", Literal["cosine"])
    bands = flow.get("output_size", int)
    config = FlowConfig(
        **flow.fields(FlowConfig, "vocab_size", "spk_embed_dim"),
        mel_bands=bands,
        pre_lookahead_len=flow.get_or("pre_lookahead_len", int, 3),
        block_tokens=block,
        inference_cfg_rate=solver.get("inference_cfg_rate", float),
        encoder=encoder,
        estimator=_estimator_from(decoder, bands, RATIO * block),
    )
    return config, as_integer(flow.get("input_frame_rate", float))


def _encoder_from(flow: ModelNode) -> tuple[EncoderConfig, int]:
    """Reads the encoder, and the tokens of its attention block."""
    encoder = flow.child("encoder", "UpsampleConformerEncoder")
    for key, only in _ENCODER_ALWAYS.items():
        if (value := encoder.get(key, type(only))) != only:
            raise ConfigError(f"{encoder.name}.{key}: {value}, but only {only} is known")
    size = encoder.get("output_size", int)
    for node in (flow, encoder):
        if (inputs := node.get("input_size", int)) != size:
            raise ConfigError(f"{node.name}.input_size: {inputs} is not the encoder's output_size {size}")
    config = EncoderConfig(
        size,
        encoder.get("attention_heads", int),
        encoder.get("linear_units", int),
        encoder.get("num_blocks", int),
        encoder.get_or("num_up_blocks", int, _UP_LAYERS),
    )
    return config, encoder.get_or("static_chunk_size", int, 0) or _BLOCK_TOKENS


def _estimator_from(decoder: ModelNode, bands: int, block_frames: int) -> UNetConfig:
    found = decoder.data.get("estimator")
    older = isinstance(found, Tagged) and found.target.rpartition(".")[2] == "ConditionalDecoder"
    estimator = decoder.child("estimator", "ConditionalDecoder" if older else "CausalConditionalDecoder")
    if older and not estimator.get("causal", bool):
        raise ConfigError(f"{estimator.name}.causal: false; only causal convolutions can be streamed")
    for key, only in (("in_channels", 4 * bands), ("out_channels", bands), ("static_chunk_size", block_frames)):
        if (value := estimator.get_or(key, int, only)) != only:
            raise ConfigError(f"{estimator.name}.{key}: {value}, but the rest of the flow wants {only}")
    estimator.get("act_fn", Literal["gelu"])
    if len(channels := estimator.get("channels", tuple[int, ...])) != 1:
        raise ConfigError(f"{estimator.name}.channels: {len(channels)} of them; only one resolution is known")
    return UNetConfig(
        channels[0],
        estimator.get("num_heads", int),
        estimator.get("attention_head_dim", int),
        estimator.get("num_mid_blocks", int),
        estimator.get("n_blocks", int),
    )
