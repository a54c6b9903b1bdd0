"""Configuration of Step-Audio2's decoder, which is read from `flow.yaml` as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from token2wav.config.hyperyaml import HyperYaml, ModelNode
from token2wav.config.values import all_positive
from token2wav.errors import ConfigError
from token2wav.families.cosyvoice2.config import RATIO, EncoderConfig
from token2wav.families.cosyvoice3.config import hift_from
from token2wav.model_config import ModelConfig, Stem
from token2wav.networks.configs import HiFTConfig, published_hift

FILES = ("flow.yaml",)
SILENCE = 4218  # the token that stands for what follows a prompt

_TOKEN_RATE, _BLOCK_TOKENS = 25, 25  # these and the next are fixed in public code
_WINDOW_BLOCKS = 2
_FF_MULT = 4


@dataclass(frozen=True)
class DiTConfig:
    """Configuration of the estimator. Field names are those of `flow.yaml`."""

    hidden_size: int
    num_heads: int
    head_dim: int
    depth: int

    def __post_init__(self) -> None:
        all_positive(self, "flow.decoder.estimator")


@dataclass(frozen=True)
class FlowConfig:
    """Configuration of the flow, which turns tokens into mel."""

    vocab_size: int
    spk_embed_dim: int
    mel_bands: int
    pre_lookahead_len: int
    inference_cfg_rate: float
    encoder: EncoderConfig
    estimator: DiTConfig
    n_timesteps: int = 10

    def __post_init__(self) -> None:
        all_positive(self, "flow")


@dataclass(frozen=True, kw_only=True)
class StepAudio2Config(ModelConfig):
    """Configuration of a model in Step-Audio2's format.

    Attributes:
        flow: sizes of the network from tokens to mel.
        hift: sizes of the network from mel to audio.
    """

    speaks_early: bool = True
    flow: FlowConfig
    hift: HiFTConfig

    @classmethod
    def of(cls, flow: FlowConfig, hift: HiFTConfig) -> StepAudio2Config:
        """Makes the configuration of a flow and a vocoder.

        Raises:
            ConfigError: they do not fit each other.
        """
        if flow.mel_bands != hift.in_channels:
            raise ConfigError(f"hift.in_channels: {hift.in_channels} mel bands, but the flow makes {flow.mel_bands}")
        return cls(
            vocab_size=flow.vocab_size,
            token_frame_rate=_TOKEN_RATE,
            block_tokens=_BLOCK_TOKENS,
            lookahead_tokens=flow.pre_lookahead_len,
            token_mel_ratio=RATIO,
            mel_bands=flow.mel_bands,
            speaker_size=flow.spk_embed_dim,
            sample_rate=hift.sampling_rate,
            samples_per_token=RATIO * hift.samples_per_frame,
            ode_steps=flow.n_timesteps,
            joined_prompt=True,
            left_blocks=_WINDOW_BLOCKS,
            flow=flow,
            hift=hift,
        )

    def part(self, stem: Stem) -> Any:
        return self.flow if stem == "flow" else self.hift


def read(folder: Path) -> StepAudio2Config:
    """Reads `flow.yaml` of a folder. HiFT's published sizes are in code; other ones stand there as CosyVoice2 has them.

    Raises:
        ConfigError: a key that is missing, of another class or out of range.
    """
    path = folder / FILES[0]
    document = HyperYaml.read(path)
    try:
        hift = hift_from(document, causal=False) if "hift" in document else published_hift()
        return StepAudio2Config.of(_flow_from(document), hift)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _flow_from(document: HyperYaml) -> FlowConfig:
    flow = ModelNode.of(document.resolve("flow"), "flow", "CausalMaskedDiffWithXvec")
    encoder = flow.child("encoder", "UpsampleConformerEncoderV2")
    decoder = flow.child("decoder", "CausalConditionalCFM")
    estimator = decoder.child("estimator", "DiT")
    size, bands = encoder.get("output_size", int), flow.get("output_size", int)
    for node, key, kind, only in (
        (flow, "input_size", int, size),
        (encoder, "input_size", int, size),
        (encoder, "input_layer", str, "linear"),
        (encoder, "pos_enc_layer_type", str, "rel_pos_espnet"),
        (encoder, "selfattention_layer_type", str, "rel_selfattn"),
        (encoder, "normalize_before", bool, True),
        (encoder, "up_stride", int, RATIO),
        (estimator, "in_channels", int, 4 * bands),
        (estimator, "out_channels", int, bands),
        (estimator, "mlp_ratio", float, _FF_MULT),
    ):
        if (value := node.get_or(key, kind, only)) != only:
            raise ConfigError(f"{node.name}.{key}: {value}, but only {only} is known here")
    return FlowConfig(
        **flow.fields("vocab_size", "spk_embed_dim", kind=int),
        mel_bands=bands,
        pre_lookahead_len=encoder.get("pre_lookahead_len", int),
        inference_cfg_rate=decoder.get("inference_cfg_rate", float),
        encoder=EncoderConfig(
            size,
            encoder.get("attention_heads", int),
            encoder.get("linear_units", int),
            encoder.get("num_blocks", int),
            encoder.get("num_up_blocks", int),
        ),
        estimator=DiTConfig(**estimator.fields("hidden_size", "num_heads", "head_dim", "depth", kind=int)),
    )
