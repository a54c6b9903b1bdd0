"""Sections of model files: `flow` and `hift` of `cosyvoice3.yaml`, and `flow` of `streamflow.yaml`, are read here."""

from __future__ import annotations

import dataclasses
from typing import Literal

from token2wav.config.hyperyaml import HyperYaml
from token2wav.config.model_node import ModelNode
from token2wav.config.values import from_mapping
from token2wav.errors import ConfigError
from token2wav.families.cosyvoice3.config import FlowConfig
from token2wav.families.streamflow.config import StreamFlowSection
from token2wav.networks.configs import CodebookConfig, EstimatorConfig, HiFTConfig, ScheduleConfig


def flow_from(document: HyperYaml) -> tuple[FlowConfig, float, ScheduleConfig]:
    """Reads the flow, the tokens per second that it takes, and the times of its ODE."""
    flow = ModelNode.of(document.resolve("flow"), "flow", "CausalMaskedDiffWithDiT")
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


def streamflow_from(document: HyperYaml) -> tuple[FlowConfig, float, ScheduleConfig]:
    """Reads the same out of a `streamflow.yaml`."""
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


def _codebooks_from(flow: ModelNode) -> CodebookConfig:
    codebooks = flow.child("codebooks")
    codebooks.get("count", int)  # it has no default
    config: CodebookConfig = from_mapping(CodebookConfig, codebooks.data, codebooks.name)
    return config


def _schedule_from(solver: ModelNode) -> ScheduleConfig:
    kind, times = solver.get("t_scheduler", Literal["cosine", "linear"]), solver.get_or("times", tuple[float, ...], ())
    try:
        return ScheduleConfig(kind, times)
    except ConfigError as error:
        raise ConfigError(f"{solver.name}.{error}") from error


def hift_from(document: HyperYaml) -> HiFTConfig:
    hift = ModelNode.of(document.resolve("hift"), "hift", "CausalHiFTGenerator")
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
