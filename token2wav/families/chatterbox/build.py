"""Chatterbox as stages: its weights are loaded and put on a device, and its networks get what runs them there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.cache.paged_kv_cache import CacheLayout, Storage
from token2wav.config import StreamConfig
from token2wav.execution.backends import Host, choose
from token2wav.execution.recompute import RecomputeFlow
from token2wav.execution.stages import Networks, Stages
from token2wav.families.chatterbox.config import ChatterboxConfig
from token2wav.families.chatterbox.source import SampleSource
from token2wav.families.cosyvoice2.build import cached_flow, ready, summary, vocoder_stage
from token2wav.families.cosyvoice2.flow import cosyvoice2_flow
from token2wav.families.cosyvoice3.weights import current_name
from token2wav.model_config import Stem
from token2wav.networks.configs import HiFTConfig, ScheduleConfig
from token2wav.networks.hift import Decode, HiFT
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import EulerSolver
from token2wav.networks.source import Phase
from token2wav.networks.streaming import WHOLE, Piece
from token2wav.networks.weights import Blank, fill, fitting_weights, floating_tensors, read_state

_PARTS = ("flow.", "mel2wav.")  # of S3Gen; the rest makes voices of recordings


def build(host: Host, config: ChatterboxConfig, stream: StreamConfig) -> Stages:
    """Makes the stages of a model.

    Raises:
        ConfigError: the settings ask for what there is for other families only.
        CheckpointError: weights are missing, unreadable, or do not fit the configuration.
    """
    graphs = choose(host, stream)
    s3gen = _loaded(host.folder, config)
    flow, hift = ready(s3gen.flow).to(host.device), ready(s3gen.mel2wav).to(host.device)
    schedule, allowed = ScheduleConfig("linear" if config.mean_flow else "cosine"), config.allowed_steps(stream.steps)
    solvers = {steps: EulerSolver(flow.estimator, steps, config.flow.inference_cfg_rate, schedule) for steps in allowed}
    cached = cached_flow(host, config, stream, flow, solvers, graphs)
    whole = RecomputeFlow(config, flow, FlowNoise(config.mel_bands), solvers, windows=True)
    pieces = dataclasses.replace(stream, reference=False)
    vocoder = vocoder_stage(host, config, pieces, hift, graphs)
    return Stages(whole if stream.reference else cached, vocoder, summary(host, graphs))


def load(folder: Path, config: ChatterboxConfig, stem: Stem) -> Any:
    """Loads flow or vocoder in float32 on the CPU, see `token2wav.families`."""
    s3gen = _loaded(folder, config)
    return ready(s3gen.flow if stem == "flow" else s3gen.mel2wav)


def _loaded(folder: Path, config: ChatterboxConfig) -> _S3Gen:
    s3gen = _S3Gen(config)
    fill(s3gen, s3gen.weights(folder / config.file))
    return s3gen


def networks(config: ChatterboxConfig, storage: Storage) -> Networks:
    """Makes flow and vocoder without weights, see `token2wav.families`."""
    s3gen = _S3Gen(config)
    flow, schedule = s3gen.flow, ScheduleConfig("linear" if config.mean_flow else "cosine")
    layout = CacheLayout.of(config, flow.estimator, config.flow.inference_cfg_rate, config.ode_steps, storage)
    return Networks(flow, s3gen.mel2wav, layout, config.flow.inference_cfg_rate, schedule, flow.encoder.token_bytes)


def check(folder: Path, config: ChatterboxConfig) -> None:
    """Reads the weights of a folder without building anything on a device.

    Raises:
        CheckpointError: the folder cannot be served, and why.
    """
    _S3Gen(config).weights(folder / config.file)


class _S3Gen(nn.Module):
    """Flow and vocoder under their public names, without weights."""

    def __init__(self, config: ChatterboxConfig) -> None:
        super().__init__()
        with Blank():
            self.flow = cosyvoice2_flow(config.flow, mean_flow=config.mean_flow)
            self.mel2wav = FadedHiFT(config.hift)

    def weights(self, path: Path) -> dict[str, torch.Tensor]:
        """Reads the weights of a file, of which S3Gen has more.

        Raises:
            CheckpointError: they are not those of the configuration.
        """
        state = {name: value for name, value in read_state(path).items() if str(name).startswith(_PARTS)}
        return fitting_weights(self, floating_tensors(state, path, current_name), path)


class FadedHiFT(HiFT):
    """HiFT whose utterances start with 20 ms of silence and 20 ms of fading in, against what is left of the prompt."""

    fade: torch.Tensor

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__(config, SampleSource)
        quiet = config.sampling_rate // 50
        rising = (1 - torch.linspace(0, torch.pi, quiet).cos()) / 2
        self.register_buffer("fade", torch.cat((torch.zeros(quiet), rising)), persistent=False)

    def forward(
        self,
        mel: torch.Tensor,
        noise: torch.Tensor,
        piece: Piece = WHOLE,
        phase: Phase = "exact",
        decode: Decode | None = None,
    ) -> torch.Tensor:
        audio = super().forward(mel, noise, piece, phase, decode)
        if piece.state is None or piece.first:
            start = self.delay if piece.first else 0
            faded = audio[:, start : start + len(self.fade)]
            faded *= self.fade[: faded.shape[1]]
        return audio
