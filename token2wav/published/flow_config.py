"""Configuration of models with a flow, from tokens to mel, and a vocoder, from mel to audio."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from token2wav.config.model_config import ModelConfig, StageName
from token2wav.errors import ConfigError
from token2wav.published.hyperyaml import HyperYaml, ModelNode
from token2wav.published.sizes import HiFTConfig, ScheduleConfig, Width

ConfigT = TypeVar("ConfigT", bound="FlowModelConfig")


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
                f"sample_rate: {rate:g} tokens per second of {samples} samples do not make "
                f"{config.sample_rate} Hz"
            )
        return config

    def __post_init__(self) -> None:
        if self.mel_bands != self.vocoder.mel.bands:
            raise ConfigError(
                f"hift.in_channels: {self.vocoder.mel.bands} mel bands, but the flow makes "
                f"{self.mel_bands}"
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
        f0_channels=f0.get("cond_channels", Width),
        causal=causal,
    )
    f0.only({"num_class": 1})
    f0.check_used("in_channels")  # the same number as in `hift`
    hift.check_used()
    istft.check_used()
    return config
