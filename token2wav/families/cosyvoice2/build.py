"""CosyVoice2 and its relatives as stages: weights are loaded and put on a device, and networks get what runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache, Storage
from token2wav.config import StreamConfig
from token2wav.errors import ConfigError
from token2wav.execution.backends import Graphs, Host, StepMaker, runner
from token2wav.execution.backends import choose as choose_backend
from token2wav.execution.cached_flow import CachedFlow
from token2wav.execution.device import cache_bytes, keep_arithmetic_exact
from token2wav.execution.exported_graphs import ExportedVocoder
from token2wav.execution.recompute import RecomputeFlow
from token2wav.execution.runner import GraphPool, graphs_enabled
from token2wav.execution.stages import FlowStage, Networks, Stages, StageSummary, VocoderStage
from token2wav.execution.vocoder import StreamingVocoder, likely_pieces
from token2wav.families.cosyvoice2.config import FlowConfig
from token2wav.families.cosyvoice2.flow import Flow, cosyvoice2_flow
from token2wav.families.cosyvoice2.weights import read_weights
from token2wav.model_config import Stem
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import FlowNoise, NormalNoise, SourceNoise
from token2wav.networks.ode import EulerSolver
from token2wav.networks.weights import Blank, fill

CAPTURED_STREAMS = 32  # of a batch of the vocoder; larger ones run in parts


class Builder(ABC):
    """Builder of one model of CosyVoice's kind. A family derives its own, with what differs.

    Args:
        host, config, stream: that it is made for.

    Attributes:
        graphs: of the backend that was chosen.
        flow, vocoder: on the device of the host.
        solvers: of the flow's estimator, by numbers of ODE steps, the usual one first.
        flow_noise, source_noise: that go into flow and vocoder; None for a vocoder without a source.
        pool: of CUDA graphs; None for none.
    """

    kernels: StepMaker | None = None  # of its own; else the attention kernel runs under its network

    def __init__(self, host: Host, config: Any, stream: StreamConfig) -> None:
        self.host, self.config, self.stream = host, config, stream
        self.graphs = self.choose(host, stream)  # before weights load: it may refuse
        keep_arithmetic_exact(host.device)
        self.flow = self.load(host.folder, config, "flow").to(host.device)
        guidance, allowed = config.flow.inference_cfg_rate, config.allowed_steps(stream.steps)
        self.solvers = {steps: EulerSolver(self.flow.estimator, steps, guidance, config.schedule) for steps in allowed}
        self.flow.estimator.drop_time_weights()
        if host.precision == "float16":
            self.flow.estimator.halve()
        self.vocoder = self.load(host.folder, config, "hift").to(host.device)
        self.flow_noise, self.source_noise = self.noises(host.folder, config)
        self.pool = GraphPool(host.device) if graphs_enabled(host.device) else None

    @classmethod
    def build(cls, host: Host, config: Any, stream: StreamConfig) -> Stages:
        """Makes the stages of a model.

        Raises:
            ConfigError: the settings ask for what the host does not have, or other families only.
            CheckpointError: weights are missing, unreadable, or do not fit the configuration.
        """
        made = cls(host, config, stream)
        summary = StageSummary(made.graphs.backend, host.precision, str(host.device))
        vocoder = made.vocoder_stage()  # first, because the cache takes a share of the memory that is left
        return Stages(made.flow_stage(), vocoder, summary)

    @classmethod
    def load(cls, folder: Path, config: Any, stem: Stem) -> Any:
        """Loads flow or vocoder in float32 on the CPU, ready for inference, see `token2wav.families`."""
        network, weights = cls._read(folder, config, stem)
        fill(network, weights)
        if stem == "hift":
            network.freeze()
        return network.eval().requires_grad_(False)

    @classmethod
    def check(cls, folder: Path, config: Any) -> None:
        """Reads the weights of a folder without building anything on a device.

        Raises:
            CheckpointError: the folder cannot be served, and why.
        """
        for stem in get_args(Stem):
            cls._read(folder, config, stem)
        cls.noises(folder, config)

    @classmethod
    def networks(cls, config: Any, storage: Storage) -> Networks:
        """Makes flow and vocoder without weights, see `token2wav.families`."""
        flow, vocoder = cls.network(config, "flow"), cls.network(config, "hift")
        guidance = config.flow.inference_cfg_rate
        layout = CacheLayout.of(config, flow.estimator, guidance, config.ode_steps, storage)
        return Networks(flow, vocoder, layout, guidance, config.schedule, flow.token_bytes)

    @classmethod
    @abstractmethod
    def network(cls, config: Any, stem: Stem) -> Any:
        """Makes flow or vocoder without weights of a folder."""

    @classmethod
    def weights(cls, network: Any, path: Path, stem: Stem) -> dict[str, torch.Tensor]:
        """Reads the weights of flow or vocoder from their file.

        Raises:
            CheckpointError: unreadable, or not those of the network.
        """
        return read_weights(network, path)

    @classmethod
    def noises(cls, folder: Path, config: Any) -> tuple[FlowNoise, SourceNoise | None]:
        """Makes the noise of the flow, and that of the vocoder's source if it has one."""
        return FlowNoise(config.mel_bands), NormalNoise(config.vocoder.nb_harmonics + 1)

    @classmethod
    def choose(cls, host: Host, stream: StreamConfig) -> Graphs:
        """Chooses the backend, see `token2wav.families`."""
        return choose_backend(host, stream)

    def flow_stage(self) -> FlowStage:
        """Makes the incremental stage of the flow. A page of its cache has room for the most steps of all solvers."""
        host, config, estimator, hop = self.host, self.config, self.flow.estimator, self.config.hops(self.stream)[1]
        storage = host.precision if host.runtime.cache_storage == "auto" else host.runtime.cache_storage
        layout = CacheLayout.of(config, estimator, config.flow.inference_cfg_rate, max(self.solvers), storage)
        pages = cache_bytes(host.runtime.cache_mib, host.device) // layout.page_bytes
        cache, longest = PagedKVCache(layout, pages, host.device), hop // config.block_tokens
        with torch.inference_mode():
            runners = {
                steps: runner(self.graphs, (estimator, solver.tables, cache), longest, self.kernels, self.pool)
                for steps, solver in self.solvers.items()
            }
        return CachedFlow(self.recompute(), runners, cache, longest_hop=hop)

    def recompute(self, **options: bool) -> RecomputeFlow:
        """Makes the stage that computes an utterance's past anew for every chunk; see there for its options."""
        window = self.config.window(self.stream)
        return RecomputeFlow(self.config, self.flow, self.flow_noise, self.solvers, left_blocks=window, **options)

    def vocoder_stage(self) -> VocoderStage:
        """Makes the stage of the vocoder in pieces."""
        stream = replace(self.stream, reference=False)  # whose chunk may be an utterance, of any length
        vocoder, hops, hold = self.vocoder, self.config.hops(stream), stream.hold_frames
        exported = ExportedVocoder(self.graphs.vocoder, vocoder) if self.graphs.vocoder else None
        pool = None if exported else self.pool
        shapes = likely_pieces(vocoder.lookahead_frames, self.config, hops, CAPTURED_STREAMS) if pool else []
        return StreamingVocoder(vocoder, self.source_noise, exported, shapes=shapes, graphs=pool, hold_frames=hold)

    @classmethod
    def _read(cls, folder: Path, config: Any, stem: Stem) -> tuple[Any, dict[str, torch.Tensor]]:
        path = config.weights_file(folder, stem)
        with Blank(path):
            network = cls.network(config, stem)
        return network, cls.weights(network, path, stem)


class CosyVoice2Builder(Builder):
    """Builder of a model with a flow of a conformer and an estimator, and symmetric HiFT."""

    make_flow: Callable[[FlowConfig[Any]], Flow[Any]] = staticmethod(cosyvoice2_flow)

    @classmethod
    def network(cls, config: Any, stem: Stem) -> Any:
        return cls.make_flow(config.flow) if stem == "flow" else HiFT(config.vocoder)

    @classmethod
    def choose(cls, host: Host, stream: StreamConfig) -> Graphs:
        if stream.reference:
            raise ConfigError("stream.reference: the public loop of this family is not repeated; leave it out")
        return super().choose(host, stream)


build, load = CosyVoice2Builder.build, CosyVoice2Builder.load
check, choose, networks = CosyVoice2Builder.check, CosyVoice2Builder.choose, CosyVoice2Builder.networks
