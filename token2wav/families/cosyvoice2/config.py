"""Configuration of CosyVoice2 models, which is read as data from `cosyvoice2.yaml`, or from the
older `cosyvoice.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from token2wav.config.hyperyaml import HyperYaml, ModelNode, Tagged
from token2wav.config.settings import Steps
from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds, check_bounds, prefixed
from token2wav.errors import ConfigError
from token2wav.families.flow_config import FlowModelConfig, hift_from
from token2wav.networks.configs import (
    ConformerConfig,
    Guidance,
    Heads,
    HiFTConfig,
    Layers,
    TokenRate,
    Tokens,
    UNetConfig,
    Vocabulary,
    Width,
)

FILES = ("cosyvoice2.yaml", "cosyvoice.yaml")
RATIO = 2  # mel frames per token, fixed in the public code

_BLOCK_TOKENS = 25  # attention block of a file that does not set one
ENCODER_ALWAYS = {
    "input_layer": "linear",
    "pos_enc_layer_type": "rel_pos_espnet",
    "selfattention_layer_type": "rel_selfattn",
    "normalize_before": True,
    "use_cnn_module": False,
    "macaron_style": False,
}

EstimatorT = TypeVar("EstimatorT")


@dataclass(frozen=True)
class FlowConfig(Generic[EstimatorT]):
    """Configuration of the flow, which turns tokens into mel. The type of `estimator` depends on
    the family.
    """

    vocab_size: Vocabulary
    spk_embed_dim: Width
    mel_bands: Width
    pre_lookahead_len: Tokens
    inference_cfg_rate: Guidance
    encoder: ConformerConfig
    estimator: EstimatorT
    block_tokens: Tokens = _BLOCK_TOKENS
    n_timesteps: Steps = 10

    token_mel_ratio: ClassVar[int] = RATIO
    hop_blocks: ClassVar[tuple[int, int]] = (1, 4)

    def __post_init__(self) -> None:
        check_bounds(self, "flow")

    @property
    def tokens(self) -> TokenFormat:
        return TokenFormat.numbers(self.vocab_size)

    @property
    def lookahead_tokens(self) -> int:
        """Tokens after a chunk that must be available before it can run."""
        return self.pre_lookahead_len


@dataclass(frozen=True, kw_only=True)
class CosyVoice2Config(FlowModelConfig):
    """Configuration of a CosyVoice2 model, or of a relative of CosyVoice2."""

    flow: FlowConfig[Any]
    vocoder: HiFTConfig


def read(folder: Path) -> CosyVoice2Config:
    """Reads the model file of a folder.

    Raises:
        ConfigError: a key is missing, or its value has the wrong class or is out of range.
    """
    path = next(folder / name for name in FILES if (folder / name).is_file())
    document = HyperYaml.read(path)
    with prefixed(f"{path}: "):
        flow, rate = _flow_from(document)
        return CosyVoice2Config.of(flow, hift_from(document, causal=False), rate)


def _flow_from(document: HyperYaml) -> tuple[FlowConfig[UNetConfig], float]:
    """Reads the flow, and its tokens per second."""
    flow = ModelNode.of(document.resolve("flow"), "flow", "CausalMaskedDiffWithXvec")
    flow.only({"token_mel_ratio": RATIO})  # the encoder makes this number of frames per token
    encoder, block = _encoder_from(flow)
    decoder = flow.child("decoder", "CausalConditionalCFM")
    solver = decoder.child("cfm_params", "DictConfig").child("content")
    solver.only({"solver": "euler", "t_scheduler": "cosine"}, omitted=False)
    bands = flow.get("output_size", Width)
    config = FlowConfig(
        **flow.fields(FlowConfig, "vocab_size", "spk_embed_dim"),
        mel_bands=bands,
        pre_lookahead_len=flow.get_or("pre_lookahead_len", Tokens, 3),
        block_tokens=block,
        inference_cfg_rate=solver.get("inference_cfg_rate", Guidance),
        encoder=encoder,
        estimator=_estimator_from(decoder, bands, RATIO * block),
    )
    return config, flow.get("input_frame_rate", TokenRate)


def _encoder_from(flow: ModelNode) -> tuple[ConformerConfig, int]:
    """Reads the encoder, and the number of tokens of its attention block."""
    encoder = flow.child("encoder", "UpsampleConformerEncoder")
    size = encoder.get("output_size", Width)
    flow.only({"input_size": size}, omitted=False)
    encoder.only({"input_size": size, **ENCODER_ALWAYS}, omitted=False)
    config = ConformerConfig(
        size,
        encoder.get("attention_heads", Heads),
        encoder.get("linear_units", Width),
        encoder.get("num_blocks", Layers),
        encoder.get_or("num_up_blocks", Layers, ConformerConfig.up_layers),
    )
    return config, encoder.get_or(
        "static_chunk_size", Annotated[int, Bounds(0, 1000)], 0
    ) or _BLOCK_TOKENS


def _estimator_from(decoder: ModelNode, bands: int, block_frames: int) -> UNetConfig:
    section = decoder.data.get("estimator")
    older = (
        isinstance(section, Tagged) and section.target.rpartition(".")[2] == "ConditionalDecoder"
    )
    estimator = decoder.child(
        "estimator", "ConditionalDecoder" if older else "CausalConditionalDecoder"
    )
    if older and not estimator.get("causal", bool):
        raise ConfigError(
            f"{estimator.name}.causal: false; only causal convolutions can be streamed"
        )
    estimator.only(
        {"in_channels": 4 * bands, "out_channels": bands, "static_chunk_size": block_frames}
    )
    estimator.only({"act_fn": "gelu"}, omitted=False)
    if len(channels := estimator.get("channels", tuple[Width, ...])) != 1:
        raise ConfigError(
            f"{estimator.name}.channels: {len(channels)} entries; only one resolution is supported"
        )
    return UNetConfig(
        channels[0],
        estimator.get("num_heads", Heads),
        estimator.get("attention_head_dim", Width),
        estimator.get("num_mid_blocks", Layers),
        estimator.get("n_blocks", Layers),
    )
