"""Configuration of Step-Audio2's decoder, which is read from `flow.yaml` as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from token2wav.config.hyperyaml import HyperYaml, ModelNode
from token2wav.config.values import all_positive
from token2wav.errors import ConfigError
from token2wav.families.cosyvoice2.config import RATIO, CosyVoice2Config, EncoderConfig, FlowConfig
from token2wav.families.cosyvoice3.config import hift_from
from token2wav.networks.configs import HiFTConfig

FILES = ("flow.yaml",)
SILENCE = 4218  # the token that stands for what follows a prompt

_TOKEN_RATE = 25  # this and the next two are fixed in public code
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


@dataclass(frozen=True, kw_only=True)
class StepAudio2Config(CosyVoice2Config):
    """Configuration of a model in Step-Audio2's format."""

    joined_prompt: bool = True
    left_blocks: int = _WINDOW_BLOCKS
    flow: FlowConfig[DiTConfig]


def read(folder: Path) -> StepAudio2Config:
    """Reads `flow.yaml` of a folder. HiFT's published sizes are in code; other ones stand there as CosyVoice2 has them.

    Raises:
        ConfigError: a key that is missing, of another class or out of range.
    """
    path = folder / FILES[0]
    document = HyperYaml.read(path)
    try:
        hift = hift_from(document, causal=False) if "hift" in document else HiFTConfig()
        return StepAudio2Config.of(_flow_from(document), hift, _TOKEN_RATE, lookbehind_tokens=0)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _flow_from(document: HyperYaml) -> FlowConfig[DiTConfig]:
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
        **flow.fields(FlowConfig, "vocab_size", "spk_embed_dim"),
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
        estimator=DiTConfig(**estimator.fields(DiTConfig)),
    )
