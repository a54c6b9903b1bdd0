"""Configuration of models with a flow, from tokens to mel, and a vocoder, from mel to audio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from token2wav.config.model_config import ModelConfig, StageName
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.hyperyaml import HyperYaml, ModelNode
from token2wav.published.sizes import ConformerConfig, HiFTConfig, ScheduleConfig, UNetConfig

ConfigT = TypeVar("ConfigT", bound="FlowModelConfig")

_ENCODER_ALWAYS = {
    "input_layer": "linear",
    "pos_enc_layer_type": "rel_pos_espnet",
    "selfattention_layer_type": "rel_selfattn",
    "normalize_before": True,
    "use_cnn_module": False,
    "macaron_style": False,
}
# Keys of the encoder that its public code uses in training only, or does not use.
ENCODER_UNUSED = (
    "dropout_rate",
    "positional_dropout_rate",
    "attention_dropout_rate",
    "gradient_checkpointing",
    "cnn_module_kernel",
    "cnn_module_norm",
    "causal",
    "use_dynamic_left_chunk",
)


@dataclass(frozen=True, kw_only=True)
class FlowModelConfig(ModelConfig):
    """Configuration of a model with a flow and a vocoder. Checks that flow and vocoder fit each
    other.

    Attributes:
        takes_prompt, provisional_chunks, fixed_hops, left_blocks: see `ModelConfig`. A family sets
            them.
    """

    stages: tuple[StageName, ...] = ("flow", "vocoder")
    takes_prompt: bool = True
    provisional_chunks: bool = True
    fixed_hops: bool = False
    left_blocks: int = -1
    flow: Any
    vocoder: Any  # sizes of the network from mel to audio. Its class selects the vocoder
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    @classmethod
    def of(
        cls: type[ConfigT],
        flow: Any,
        vocoder: Any,
        token_frame_rate: float | None = None,
        **fields: Any,
    ) -> ConfigT:
        """Makes the configuration of a flow and a vocoder.

        Args:
            token_frame_rate: published number of tokens per second; None if none is published.
            fields: further fields of the class.
        """
        config = cls(
            tokens=flow.tokens,
            sample_rate=vocoder.mel.sample_rate_hz,
            samples_per_token=flow.token_mel_ratio * vocoder.mel.hop_samples,
            block_tokens=flow.block_tokens,
            lookahead_tokens=flow.lookahead_tokens,
            hop_blocks=flow.hop_blocks,
            flow=flow,
            vocoder=vocoder,
            **fields,
        )
        rate, samples = token_frame_rate, config.samples_per_token
        # Rates such as 22050 / 512 have infinitely many decimals.
        if rate is not None and not math.isclose(rate * samples, config.sample_rate, rel_tol=1e-6):
            raise ConfigError(
                f"sample_rate: {rate:g} tokens per second of {samples} samples "
                f"({config.token_mel_ratio} mel frames) do not make {config.sample_rate} Hz"
            )
        return config

    def __post_init__(self) -> None:
        if self.mel_bands != (bands := self.vocoder.mel.bands):
            raise ConfigError(
                f"{self.vocoder.BANDS}: {bands} mel bands, but the flow makes {self.mel_bands}; "
                "use a vocoder that was trained on the mels of the flow"
            )

    @property
    def token_mel_ratio(self) -> int:
        return int(self.flow.token_mel_ratio)

    @property
    def mel_bands(self) -> int:
        return int(self.flow.mel_bands)

    @property
    def speaker_size(self) -> int:
        return int(self.flow.spk_embed_dim)

    @property
    def ode_steps(self) -> int:
        return int(self.flow.n_timesteps)

    @property
    def fixed_steps(self) -> bool:
        return bool(self.schedule.times)

    def stage_config(self, stage: StageName) -> Any:
        return self.flow if stage == "flow" else self.vocoder


def check_flow_used(flow: ModelNode, decoder: ModelNode, solver: ModelNode) -> None:
    """Raises ConfigError if the section `flow` of a model file has a key that was not read, except
    keys of the training.
    """
    flow.check_used("output_type", "only_mask_loss", "decoder_conf", "mel_feat_conf")
    decoder.check_used("in_channels", "n_spks", "spk_emb_dim")
    solver.check_used("sigma_min", "training_cfg_rate", "reg_loss_type")


def conformer_from(
    flow: ModelNode,
    encoder: ModelNode,
    up_layers: int = ConformerConfig.up_layers,
    *,
    variant: Mapping[str, Any] | None = None,
    omitted: bool = False,
) -> ConformerConfig:
    """Reads the sizes of an encoder, and checks that it is of the only supported kind.

    Args:
        variant: supported values of keys, if CosyVoice has others.
        omitted: whether the file may omit keys.
    """
    size = encoder.get("output_size", bounded.Width)
    flow.only({"input_size": size}, omitted=omitted)
    encoder.only({"input_size": size, **_ENCODER_ALWAYS, **(variant or {})}, omitted=omitted)
    encoder.only({"activation_type": "swish", "key_bias": True, "positionwise_conv_kernel_size": 1})
    return ConformerConfig(
        size,
        encoder.get("attention_heads", bounded.Heads),
        encoder.get("linear_units", bounded.Width),
        encoder.get("num_blocks", bounded.Layers),
        up_layers,
    )


def unet_from(estimator: ModelNode, bands: int) -> tuple[UNetConfig, int]:
    """Reads the sizes of a U-Net whose resolutions all have one width, and their number."""
    estimator.only({"in_channels": 4 * bands, "out_channels": bands})
    estimator.only({"act_fn": "gelu"}, omitted=False)
    channels = estimator.get("channels", tuple[bounded.Width, ...])
    if len({*channels}) != 1:
        raise ConfigError(
            f"{estimator.name}.channels: {list(channels)}; all resolutions must have one width"
        )
    config = UNetConfig(
        channels[0],
        estimator.get("num_heads", bounded.Heads),
        estimator.get("attention_head_dim", bounded.Width),
        estimator.get("num_mid_blocks", bounded.Layers),
        estimator.get("n_blocks", bounded.Layers),
    )
    return config, len(channels)


def hift_from(document: HyperYaml, *, causal: bool) -> HiFTConfig:
    """Reads the section `hift` of a model file: the causal HiFT of CosyVoice3, or the centred HiFT
    of earlier generations.
    """
    kind = "Causal" if causal else ""
    hift = ModelNode.of(document.resolve("hift"), "hift", f"{kind}HiFTGenerator")
    f0 = hift.child("f0_predictor", f"{kind}ConvRNNF0Predictor")
    istft = hift.child("istft_params")
    elsewhere = ["n_fft", "hop_len", "f0_channels", "causal"]
    config = HiFTConfig(
        **hift.fields(HiFTConfig, but=elsewhere if causal else [*elsewhere, "conv_pre_look_right"]),
        **istft.fields(HiFTConfig, "n_fft", "hop_len"),
        f0_channels=f0.get("cond_channels", bounded.Width),
        causal=causal,
    )
    f0.only({"num_class": 1})
    f0.check_used("in_channels")  # the same number as in `hift`
    hift.check_used()
    istft.check_used()
    return config
