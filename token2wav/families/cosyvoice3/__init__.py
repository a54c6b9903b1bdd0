"""CosyVoice3: its folder, the flow on a DiT, and HiFT.

Its configuration is read from `cosyvoice3.yaml` as data, and validated here, once, before any
weight is read. All other code relies on valid values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from token2wav.config.model_config import StageName
from token2wav.config.settings import Steps
from token2wav.config.token_format import TokenFormat
from token2wav.config.values import check_bounds, from_mapping, prefixed
from token2wav.errors import ConfigError
from token2wav.families.cosyvoice3.bigvgan import GENERATOR_FILES, vocoder_from
from token2wav.published import bounded
from token2wav.published.flow_config import FlowModelConfig, check_flow_used, hift_from
from token2wav.published.hyperyaml import HyperYaml, ModelNode
from token2wav.published.sizes import (
    BigVGANConfig,
    CodebookConfig,
    EstimatorConfig,
    ScheduleConfig,
    Spacing,
)

MODEL_FILE = "cosyvoice3.yaml"
FILES = (MODEL_FILE,)
DOWNLOADS = (
    *FILES,
    "flow.safetensors|flow.pt",
    "hift.safetensors|hift.pt",
    "noise.safetensors",
    "bigvgan/*",
)


@dataclass(frozen=True)
class FlowConfig:
    """Configuration of the flow, which turns tokens into mel.

    The public code fixes `lookbehind_len`, and the default of `n_timesteps`; published YAML files
    have neither.
    """

    vocab_size: bounded.Vocabulary
    input_size: bounded.Width
    spk_embed_dim: bounded.Width
    token_mel_ratio: bounded.Ratio
    pre_lookahead_len: bounded.Tokens
    pre_lookahead_channels: bounded.Width
    inference_cfg_rate: bounded.Guidance
    estimator: EstimatorConfig
    n_timesteps: Steps = 10
    lookbehind_len: bounded.Tokens = 2
    codebooks: CodebookConfig | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "flow")
        if (
            self.codebooks
            and self.codebooks.merge == "concat"
            and self.input_size % self.codebooks.count
        ):
            raise ConfigError(
                f"flow.input_size: {self.input_size} is not a multiple of {self.codebooks.count}, "
                f"the codebooks whose "
                "embeddings are concatenated"
            )
        if self.input_size != self.estimator.mu_dim:
            raise ConfigError(
                f"flow.input_size: {self.input_size} is not the estimator's mu_dim "
                f"{self.estimator.mu_dim}"
            )
        if self.estimator.static_chunk_size % self.token_mel_ratio:
            raise ConfigError(
                f"flow.decoder.estimator.static_chunk_size: {self.estimator.static_chunk_size} "
                f"frames are not a "
                f"whole number of tokens of {self.token_mel_ratio} frames"
            )

    @property
    def lookahead_tokens(self) -> int:
        """Tokens after a chunk that must be available before it can run."""
        return self.pre_lookahead_len

    @property
    def hop_blocks(self) -> tuple[int, int]:
        """Blocks of the first and of the longest hop. 4 blocks of 25 tokens are 4 s."""
        return 1, 4

    @property
    def mel_bands(self) -> int:
        return self.estimator.mel_dim

    @property
    def tokens(self) -> TokenFormat:
        if self.codebooks:
            return TokenFormat.codes(self.codebooks.count, self.vocab_size)
        return TokenFormat.numbers(self.vocab_size)

    @property
    def block_tokens(self) -> int:
        return self.estimator.static_chunk_size // self.token_mel_ratio


@dataclass(frozen=True, kw_only=True)
class CosyVoice3Config(FlowModelConfig):
    """Configuration of a model in the format of CosyVoice3."""

    FILE: ClassVar[str] = MODEL_FILE

    flow: FlowConfig
    vocoder_folder: str = ""  # folder of a BigVGAN below the model folder; empty for HiFT

    @classmethod
    def read(cls, folder: Path) -> CosyVoice3Config:
        """Reads the model file of a folder, and `config.json` of its BigVGAN if it has one."""
        path = folder / cls.FILE
        document = HyperYaml.read(path)
        with prefixed(f"{path}: "):
            flow, rate, schedule = cls._flow_from(document)
            if "vocoder" not in document:
                return cls.of(flow, hift_from(document, causal=True), rate, schedule=schedule)
            vocoder, below = vocoder_from(document, folder)
            return cls.of(flow, vocoder, rate, vocoder_folder=below, schedule=schedule)

    @classmethod
    def _flow_from(cls, document: HyperYaml) -> tuple[FlowConfig, float, ScheduleConfig]:
        """Reads the flow, its tokens per second, and the schedule of its ODE."""
        flow = ModelNode.of(document.resolve("flow"), "flow", "CausalMaskedDiffWithDiT")
        lookahead = flow.child("pre_lookahead_layer", "PreLookaheadLayer")
        if (length := lookahead.get("pre_lookahead_len", bounded.Tokens)) != (
            outer := flow.get("pre_lookahead_len", bounded.Tokens)
        ):
            raise ConfigError(
                f"{lookahead.name}.pre_lookahead_len: {length}, but flow.pre_lookahead_len is "
                f"{outer}"
            )
        decoder = flow.child("decoder", "CausalConditionalCFM")
        solver = decoder.child("cfm_params", "DictConfig").child("content")
        solver.only({"solver": "euler"}, omitted=False)
        kind, times = solver.get("t_scheduler", Spacing), solver.get_or("times", bounded.Times, ())
        with prefixed(f"{solver.name}."):
            schedule = ScheduleConfig(kind, times)
        codebooks = flow.child("codebooks") if "codebooks" in flow.data else None
        if codebooks:
            codebooks.get("count", int)  # required: it has no default
        estimator = decoder.child("estimator", "DiT")
        config = FlowConfig(
            **flow.fields(
                FlowConfig,
                "vocab_size",
                "input_size",
                "spk_embed_dim",
                "token_mel_ratio",
                "pre_lookahead_len",
            ),
            pre_lookahead_channels=lookahead.get("channels", bounded.Width),
            inference_cfg_rate=solver.get("inference_cfg_rate", bounded.Guidance),
            estimator=EstimatorConfig(
                **estimator.fields(
                    EstimatorConfig,
                    but=("guided", "position_convolutions", "long_skip_connection"),
                ),
                long_skip_connection=estimator.get_or("long_skip_connection", bool, False) or None,
            ),
            n_timesteps=len(times) - 1
            if times
            else solver.get_or("n_timesteps", Steps, FlowConfig.n_timesteps),
            codebooks=from_mapping(CodebookConfig, codebooks.data, codebooks.name)
            if codebooks
            else None,
        )
        rate = flow.get("input_frame_rate", bounded.TokenRate)
        flow.only({"output_size": config.mel_bands})
        lookahead.only({"in_channels": config.input_size})
        lookahead.check_used()
        estimator.check_used("dropout", "num_decoding_left_chunks")
        check_flow_used(flow, decoder, solver)
        return config, rate, schedule

    def weights_names(self, stage: StageName) -> tuple[str, ...]:
        if stage == "vocoder" and isinstance(self.vocoder, BigVGANConfig):
            return tuple(f"{self.vocoder_folder}/{name}" for name in GENERATOR_FILES)
        return super().weights_names(stage)


read = CosyVoice3Config.read
