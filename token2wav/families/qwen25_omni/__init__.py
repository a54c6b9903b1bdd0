"""Qwen2.5-Omni: codes to mel by a flow under guided attention, and BigVGAN on a rescaled mel.

Its configuration is the section `token2wav_config` in `config.json` of the whole published model.
The defaults are the published sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from token2wav.config import StreamConfig
from token2wav.config.model_config import StageName
from token2wav.config.values import Bounds, Length, check_bounds, prefixed
from token2wav.errors import ConfigError
from token2wav.families.streamflow import GuidedFlowConfig
from token2wav.published import bounded
from token2wav.published.checkpoint_files import PUBLISHED
from token2wav.published.flow_config import FlowModelConfig
from token2wav.published.formats import ROPE_TYPES, TRANSFORMERS, Format
from token2wav.published.relations import AsLong, Divides, Multiple
from token2wav.published.sizes import (
    BigVGANConfig,
    EcapaConfig,
    EstimatorConfig,
    GuidedAttention,
    Mask,
    ScheduleConfig,
)
from token2wav.published.transformers_json import CONFIG_JSON, read_json

MODEL_TYPES = ("qwen2_5_omni",)
DOWNLOADS = ("config.json", "model.safetensors", "spk_dict.pt")
WEIGHT_PREFIXES = ("token2wav.",)
PREFIXES: dict[StageName, str] = {  # beginnings of the names of the weights of a stage
    "flow": "token2wav.code2wav_dit_model.",
    "vocoder": "token2wav.code2wav_bigvgan_model.",
}

_RATE = 24_000  # Hz; no file has it
_SECTION = "token2wav_config"
_DIT, _BIGVGAN = "dit_config", "bigvgan_config"
_DIT_FORMAT = Format(
    section=f"{_SECTION}.{_DIT}",
    optional=True,
    names={  # of `transformers`, and of published files
        "hidden_size": ("hidden_size", "dim"),
        "num_hidden_layers": ("num_hidden_layers", "depth"),
        "num_attention_heads": ("num_attention_heads", "heads"),
    },
    only={
        **ROPE_TYPES,
        **dict.fromkeys(("rope_parameters.rope_theta", "rope_theta"), 10_000),
        "long_skip_connection": False,
    },
    without_effect=(*TRANSFORMERS, "dropout", "enc_global_context", "enc_lin_neurons"),
)
_BIGVGAN_FORMAT = Format(
    section=f"{_SECTION}.{_BIGVGAN}",
    optional=True,
    only={  # constants of the public code, which some files write out
        "activation": "snakebeta",
        "snake_logscale": True,
        "use_tanh_at_final": False,
        "use_bias_at_final": False,
    },
    without_effect=TRANSFORMERS,
)
# The public code has these numbers as defaults of its functions.
_STEPS = 9  # between ten times
_GUIDANCE = 0.5
_CHUNK_BLOCKS = 3  # of the streams of vLLM-Omni

LayerIndices = Annotated[tuple[Annotated[int, Bounds(0, 255)], ...], Length(256)]


@dataclass(frozen=True)
class DitSection:
    """Section `dit_config`, with the names and defaults of `transformers`.

    Attributes:
        look_ahead_layers, look_backward_layers: layers, counted from 0, in which a block also
            attends to the block after it, or before it.
        enc_dim: length of the vector that ECAPA-TDNN makes of the mel of a voice.
    """

    hidden_size: bounded.Width = 1024
    num_hidden_layers: bounded.Layers = 22
    num_attention_heads: bounded.Heads = 16
    head_dim: bounded.HeadWidth = 64
    ff_mult: bounded.Ratio = 2
    emb_dim: bounded.Width = 512  # channels of the embedding of a code
    # mel frames of an attention block
    block_size: Annotated[bounded.Frames, Multiple("repeats", "the frames of a code")] = 24
    look_ahead_layers: LayerIndices = (10,)
    look_backward_layers: LayerIndices = (0, 20)
    repeats: bounded.Ratio = 2  # mel frames of a code
    num_embeds: bounded.Vocabulary = 8193  # number of codes. The embedding has one row more
    mel_dim: bounded.Width = 80
    enc_emb_dim: bounded.Width = 192  # length of the vector `cond` of a voice
    enc_dim: bounded.Width = EcapaConfig.dim
    enc_channels: Annotated[tuple[bounded.Width, ...], Length(16, least=3)] = EcapaConfig.channels
    enc_kernel_sizes: Annotated[
        tuple[bounded.OddKernel, ...], bounded.Stages, AsLong("enc_channels")
    ] = EcapaConfig.kernel_sizes
    enc_dilations: Annotated[
        tuple[bounded.Dilation, ...], bounded.Stages, AsLong("enc_channels")
    ] = EcapaConfig.dilations
    enc_attention_channels: bounded.Width = EcapaConfig.attention_channels
    enc_res2net_scale: Annotated[bounded.Ratio, Divides("block_channels")] = (
        EcapaConfig.res2net_scale
    )
    enc_se_channels: bounded.Width = EcapaConfig.se_channels

    def __post_init__(self) -> None:
        check_bounds(self, "")
        first, *blocks, last = self.enc_channels
        if set(blocks) != {first} or last != sum(blocks):
            raise ConfigError(
                f"enc_channels: {list(self.enc_channels)} do not fit together; the first layer and "
                "all blocks must have the same number, and the last layer their sum over the blocks"
            )

    @property
    def block_channels(self) -> int:
        """Channels of a block of ECAPA-TDNN."""
        return self.enc_channels[0]

    def attention(self) -> GuidedAttention:
        """Returns the masks of the layers. The public code ignores a layer that does not exist."""
        for layer in self.look_backward_layers:
            if layer in self.look_ahead_layers:
                raise ConfigError(
                    f"look_backward_layers: layer {layer} is in look_ahead_layers too; expected "
                    "each layer in at most one of them"
                )
        masks: dict[int, Mask] = dict.fromkeys(self.look_backward_layers, "backward")
        masks |= dict.fromkeys(self.look_ahead_layers, "forward")
        return GuidedAttention(
            tuple(masks.get(layer, "block") for layer in range(self.num_hidden_layers))
        )

    def flow(self) -> OmniFlowConfig:
        encoder = {
            size.name: getattr(self, "mel_dim" if size.name == "mel_dim" else f"enc_{size.name}")
            for size in fields(EcapaConfig)
        }
        speaker = self.enc_emb_dim + self.enc_dim
        return OmniFlowConfig(
            vocab_size=self.num_embeds,
            input_size=self.emb_dim,
            spk_embed_dim=speaker,
            token_mel_ratio=self.repeats,
            inference_cfg_rate=_GUIDANCE,
            estimator=EstimatorConfig(
                dim=self.hidden_size,
                depth=self.num_hidden_layers,
                heads=self.num_attention_heads,
                dim_head=self.head_dim,
                ff_mult=self.ff_mult,
                mel_dim=self.mel_dim,
                mu_dim=self.emb_dim,
                spk_dim=speaker,
                out_channels=self.mel_dim,
                static_chunk_size=self.block_size,
                guided=self.attention(),
                position_convolutions=False,
            ),
            n_timesteps=_STEPS,
            chunk_blocks=_CHUNK_BLOCKS,
            encoder=EcapaConfig(**encoder),
        )


@dataclass(frozen=True)
class BigVGANSection:
    """Section `bigvgan_config`, with the names and defaults of `transformers`."""

    mel_dim: bounded.Width = 80
    upsample_initial_channel: bounded.Width = 1536
    resblock_kernel_sizes: bounded.SomeKernels = (3, 7, 11)
    resblock_dilation_sizes: bounded.SomeDilations = ((1, 3, 5),) * 3
    upsample_rates: bounded.SomeRates = (5, 3, 2, 2, 2, 2)
    upsample_kernel_sizes: bounded.SomeKernels = (11, 7, 4, 4, 4, 4)

    def __post_init__(self) -> None:
        check_bounds(self, "")

    def vocoder(self) -> BigVGANConfig:
        names = [size.name for size in fields(self) if size.name != "mel_dim"]
        return BigVGANConfig(
            **{name: getattr(self, name) for name in names},
            resblock="1",
            activation="snakebeta",
            snake_logscale=True,
            num_mels=self.mel_dim,
            hop_size=math.prod(self.upsample_rates),
            sampling_rate=_RATE,
            use_tanh_at_final=False,
            use_bias_at_final=False,
        )


@dataclass(frozen=True)
class OmniFlowConfig(GuidedFlowConfig):
    """Configuration of the flow.

    Streams compute their chunks in windows. The default window is that of the public pipeline: the
    blocks that one evaluation of the estimator reaches (two before a chunk and one after it, at the
    published sizes). A wider window comes closer to the whole utterance.

    Attributes:
        widening: factor by which a window has more blocks on both sides than the default.
    """

    encoder: EcapaConfig = field(default_factory=EcapaConfig)  # sizes of ECAPA-TDNN
    widening: Annotated[int, Bounds(1, 100)] = 1

    @property
    def lookahead_tokens(self) -> int:
        return self.widening * super().lookahead_tokens

    @property
    def past_tokens(self) -> int:
        return self.widening * super().past_tokens


@dataclass(frozen=True, kw_only=True)
class Qwen25OmniConfig(FlowModelConfig):
    """Configuration of the decoder of Qwen2.5-Omni. The speaker embedding of a voice is the vector
    `cond` of `spk_dict.pt`, followed by the output of ECAPA-TDNN (`voices.py`).
    """

    flow: OmniFlowConfig

    takes_prompt: bool = False
    provisional_chunks: bool = False
    fixed_hops: bool = True

    def check(self, stream: StreamConfig) -> None:
        super().check(stream)
        self.flow.check_stream(stream)

    def weights_names(self, stage: StageName) -> tuple[str, ...]:
        return PUBLISHED


def read(folder: Path) -> Qwen25OmniConfig:
    """Reads the configuration of a folder. Settings of the language models are skipped."""
    path = folder / CONFIG_JSON
    document = read_json(path)
    section = document.get(_SECTION)
    with prefixed(f"{path}: "):
        if not isinstance(section, dict):
            kind = type(section).__name__
            raise ConfigError(
                f"{_SECTION}: expected an object, got {kind}; this folder has no decoder"
            )
        dit = _DIT_FORMAT.read(DitSection, document)
        sizes = _BIGVGAN_FORMAT.read(BigVGANSection, document)
        if sizes.mel_dim != dit.mel_dim:
            raise ConfigError(
                f"{_BIGVGAN_FORMAT.section}.mel_dim: {sizes.mel_dim}, but {_DIT}.mel_dim is "
                f"{dit.mel_dim}"
            )
        with prefixed(f"{_DIT_FORMAT.section}."):
            flow = dit.flow()
        with prefixed(f"{_BIGVGAN_FORMAT.section}."):
            vocoder = sizes.vocoder()
        return Qwen25OmniConfig.of(flow, vocoder, schedule=ScheduleConfig("sway", method="rk4"))
