"""CosyVoice2 and MOSS-Speech: their folders. The flow is a conformer and a U-Net; the vocoder is
HiFT with centred convolutions.

Their configuration is read as data from `cosyvoice2.yaml`, from the older `cosyvoice.yaml`, or from
`config.yaml` of MOSS-Speech.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from token2wav.config.model_config import ENDINGS, ModelConfig, StageName
from token2wav.config.settings import Steps, StreamConfig
from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds, check_bounds, prefixed
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.flow_config import (
    ENCODER_UNUSED,
    FlowModelConfig,
    check_flow_used,
    conformer_from,
    hift_from,
    unet_from,
)
from token2wav.published.hyperyaml import HyperYaml, ModelNode, Tagged
from token2wav.published.sizes import ConformerConfig, HiFTConfig, UNetConfig

CHUNK_WEIGHTS = "flow-chunk-*"  # weights of MOSS-Speech for one attention block each
FILES = ("cosyvoice2.yaml", "cosyvoice.yaml", CHUNK_WEIGHTS)
DOWNLOADS = (
    "cosyvoice2.yaml|cosyvoice.yaml|config.yaml",
    f"{CHUNK_WEIGHTS}|flow.safetensors|flow.pt",
    "hift.safetensors|hift.pt",
)
RATIO = 2  # mel frames per token of a file that does not set them

_MODEL_FILES = (*FILES[:2], "config.yaml")
_BLOCK_TOKENS = 25  # attention block of a file that does not set one
# Least mel frames of the first hop, of which the vocoder withholds 21, and of the longest hop.
_FIRST_HOP_FRAMES, _LONGEST_HOP_FRAMES = 40, 200

EstimatorT = TypeVar("EstimatorT")


@dataclass(frozen=True)
class FlowConfig(Generic[EstimatorT]):
    """Configuration of the flow, which turns tokens into mel. The type of `estimator` depends on
    the family.

    Attributes:
        ratio: mel frames per token. None for 2, so that hashes of such configurations stay the
            same.
    """

    vocab_size: bounded.Vocabulary
    spk_embed_dim: bounded.Width
    mel_bands: bounded.Width
    pre_lookahead_len: bounded.Tokens
    inference_cfg_rate: bounded.Guidance
    encoder: ConformerConfig
    estimator: EstimatorT
    block_tokens: bounded.Tokens = _BLOCK_TOKENS
    n_timesteps: Steps = 10
    ratio: bounded.Ratio | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "flow")

    @property
    def token_mel_ratio(self) -> int:
        return self.ratio or RATIO

    @property
    def tokens(self) -> TokenFormat:
        return TokenFormat.numbers(self.vocab_size)

    @property
    def lookahead_tokens(self) -> int:
        """Tokens after a chunk that must be available before it can run."""
        return self.pre_lookahead_len

    @property
    def hop_blocks(self) -> tuple[int, int]:
        """Blocks of the first and of the longest hop."""
        frames = self.token_mel_ratio * self.block_tokens
        return ceil(_FIRST_HOP_FRAMES / frames), ceil(_LONGEST_HOP_FRAMES / frames)


@dataclass(frozen=True, kw_only=True)
class CosyVoice2Config(FlowModelConfig):
    """Configuration of a CosyVoice2 model, or of a relative of CosyVoice2.

    Attributes:
        block_choices: tokens of the attention blocks that `StreamConfig.block_tokens` may choose.
            Empty allows every block, None only the block of the model.
    """

    flow: FlowConfig[Any]
    vocoder: HiFTConfig
    block_choices: tuple[int, ...] | None = None

    def with_stream_settings(self, stream: StreamConfig) -> ModelConfig:
        """Sets the attention block."""
        block, choices = stream.block_tokens, self.block_choices
        if not block or choices is None:
            return super().with_stream_settings(stream)
        if choices and block not in choices:
            raise ConfigError(
                f"stream.block_tokens: {block}, but the folder has weights for blocks of "
                f"{', '.join(map(str, choices))} tokens only"
            )
        flow = replace(self.flow, block_tokens=block)
        return replace(self, flow=flow, block_tokens=block, hop_blocks=flow.hop_blocks)

    def weights_names(self, stage: StageName) -> tuple[str, ...]:
        if stage != "flow" or not self.block_choices:
            return super().weights_names(stage)
        return tuple(f"flow-chunk-{self.block_tokens}{ending}" for ending in ENDINGS)


def read(folder: Path) -> CosyVoice2Config:
    path = next((folder / name for name in _MODEL_FILES if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(f"{folder}: contains none of {', '.join(_MODEL_FILES)}")
    document = HyperYaml.read(path)
    with prefixed(f"{path}: "):
        flow, rate, dynamic = _flow_from(document)
        choices = _blocks_of_weights(folder) or (() if dynamic else None)
        hift = hift_from(document, causal=False)
        return CosyVoice2Config.of(flow, hift, rate, block_choices=choices)


def _blocks_of_weights(folder: Path) -> tuple[int, ...]:
    """Lists the attention blocks, in tokens, that MOSS-Speech has weights of its own for."""
    names = [re.match(r"flow-chunk-(\d{1,4})\b", path.name) for path in folder.glob(CHUNK_WEIGHTS)]
    return tuple(sorted({int(name[1]) for name in names if name}))


def _flow_from(document: HyperYaml) -> tuple[FlowConfig[UNetConfig], float, bool]:
    """Reads the flow, its tokens per second, and whether it was trained on dynamic chunks."""
    flow = ModelNode.of(document.resolve("flow"), "flow", "CausalMaskedDiffWithXvec")
    ratio = flow.get_or("token_mel_ratio", bounded.Ratio, RATIO)
    encoder, block, dynamic = _encoder_from(flow, ratio)
    decoder = flow.child("decoder", "CausalConditionalCFM")
    solver = decoder.child("cfm_params", "DictConfig").child("content")
    solver.only({"solver": "euler", "t_scheduler": "cosine"}, omitted=False)
    bands = flow.get("output_size", bounded.Width)
    config = FlowConfig(
        **flow.fields(FlowConfig, "vocab_size", "spk_embed_dim"),
        mel_bands=bands,
        pre_lookahead_len=flow.get_or("pre_lookahead_len", bounded.Tokens, 3),
        block_tokens=block,
        inference_cfg_rate=solver.get("inference_cfg_rate", bounded.Guidance),
        encoder=encoder,
        estimator=_estimator_from(decoder, bands, ratio * block),
        ratio=None if ratio == RATIO else ratio,
    )
    rate = flow.get("input_frame_rate", bounded.TokenRate)
    check_flow_used(flow, decoder, solver)
    return config, rate, dynamic


def _encoder_from(flow: ModelNode, ratio: int) -> tuple[ConformerConfig, int, bool]:
    """Reads the encoder, the number of tokens of its attention block, and whether it was trained on
    dynamic chunks.
    """
    encoder = flow.child("encoder", "UpsampleConformerEncoder")
    if (stride := encoder.get_or("upsample_stride", bounded.Ratio, RATIO)) != ratio:
        raise ConfigError(
            f"{encoder.name}.upsample_stride: {stride}, but flow.token_mel_ratio is {ratio}"
        )
    up_layers = encoder.get_or("num_up_blocks", bounded.Layers, ConformerConfig.up_layers)
    config = conformer_from(flow, encoder, up_layers)
    block = encoder.get_or("static_chunk_size", Annotated[int, Bounds(0, 1000)], 0)
    dynamic = encoder.get_or("use_dynamic_chunk", bool, False)
    encoder.check_used(*ENCODER_UNUSED)
    return config, block or _BLOCK_TOKENS, dynamic


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
    estimator.only({"static_chunk_size": block_frames})
    config, levels = unet_from(estimator, bands)
    if levels != 1:
        raise ConfigError(
            f"{estimator.name}.channels: {levels} entries; only one resolution is supported"
        )
    estimator.check_used("dropout", "num_decoding_left_chunks")
    return config
