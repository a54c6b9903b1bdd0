"""Assembly of a model: loads the networks of a family, puts them on a device, and makes the stages
that run them.

This is the only module that chooses device, backend, precision, CUDA graph pool, cache size and
kind of stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.backends import (
    Backend,
    LoadContext,
    choose,
    encoder_runner,
    flow_runner,
    gpu_runs_kernels,
)
from token2wav.cache.encoder_cache import page_bytes
from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache, Storage
from token2wav.config import RuntimeConfig, StreamConfig
from token2wav.config.model_config import ModelConfig, StageName
from token2wav.config.settings import DecoderPrecision
from token2wav.errors import ConfigError
from token2wav.execution.captured_sizes import CAPTURED_STREAMS
from token2wav.execution.cuda_graphs import GraphPool, GraphSummary, graphs_enabled
from token2wav.execution.device import (
    cache_bytes,
    device_named,
    enough_memory,
    entered,
    keep_arithmetic_exact,
    keep_compiled_operations,
    keep_freed_memory,
)
from token2wav.exported.run import ExportedVocoder, signals_of
from token2wav.families.family import Family, StageParts
from token2wav.layers.convolutions import round_products
from token2wav.layers.packed_linear import pack_linears
from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import FlowNoise, NoiseTable, SourceNoise
from token2wav.networks.ode import EulerSolver, OdeTables
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.networks.weights import SkipInit, fill
from token2wav.published.artifacts import GraphName
from token2wav.published.checkpoint_files import weights_file
from token2wav.published.registry import family_of, read_config
from token2wav.published.sizes import ScheduleConfig
from token2wav.stages.cached_flow import (
    CachedFlow,
    check_pages,
    encoder_cache,
    flow_states,
)
from token2wav.stages.pause import Pause, PauseFlow, PauseVocoder
from token2wav.stages.piece_sizes import kernel_sizes
from token2wav.stages.recompute import RecomputeFlow, RecomputeVocoder
from token2wav.stages.stage import FlowStage, Stage, Stages, StageSummary
from token2wav.stages.waveform import (
    KernelPieces,
    WaveformStage,
    check_lookahead_frames,
    likely_pieces,
)

log = logging.getLogger(__name__)

# Largest number of streams whose states are allocated at load: 6 GB for public CosyVoice3.
_MOST_PREPARED = 1024


@dataclass(frozen=True, eq=False)
class FlowNetworks:
    """Networks of a flow and a vocoder without weights, for memory plans and exports."""

    flow: Any  # implements `Encoder`, and has the attribute `estimator`
    vocoder: Any
    layout: CacheLayout
    guidance: float
    schedule: ScheduleConfig
    page_bytes: int  # of the cache, with the keys and values of the encoder


@dataclass(frozen=True, eq=False)
class Exportable:
    """Model folder with networks that can be exported."""

    config: ModelConfig
    networks: Mapping[StageName, Any]  # without weights, on the device `meta`
    guidance: float  # classifier-free guidance rate of the flow; 0 without a flow
    load: Callable[[StageName], Any]  # loads a network in float32 on the CPU

    @property
    def onnx_graphs(self) -> tuple[GraphName, ...]:
        """Graphs that a server on ONNX Runtime needs."""
        return ("decoder",) if "decoder" in self.networks else ("step", "vocoder")


def exportable(folder: Path) -> Exportable:
    """Returns the networks of a model folder, for an export; raises ConfigError if there is no such
    folder, or its family runs on torch alone.
    """
    config = read_config(folder)
    family = family_for(config)
    if family.torch_only:
        raise ConfigError(
            f"{folder}: {family.torch_only} runs only on torch, so there are no graphs to export"
        )
    load = partial(load_network, folder, config)
    with torch.device("meta"):
        if "decoder" in config.stages:
            return Exportable(config, {"decoder": family.network(config, "decoder")}, 0.0, load)
        parts = flow_networks(config, "float32")
    networks: dict[StageName, Any] = {"flow": parts.flow, "vocoder": parts.vocoder}
    return Exportable(config, networks, parts.guidance, load)


def family_for(config: ModelConfig) -> Family:
    """Returns the family of a model, which the type of its configuration determines."""
    family: Family = family_of(config)
    return family


def assemble(
    folder: Path,
    config: ModelConfig,
    stream: StreamConfig,
    runtime: RuntimeConfig,
    streams: int = 0,
    names: Sequence[StageName] = (),
) -> Stages:
    """Makes the stages of a model.

    Args:
        config: configuration of the model, with the settings of streams applied.
        streams: open streams to allocate states for; further streams allocate more.
        names: stages to make; by default all.

    Raises:
        ConfigError: the settings need something that this machine or this family does not have.
        CheckpointError: weights are missing, unreadable, or do not fit the configuration.
    """
    device = device_named(runtime.device)
    context = LoadContext(folder, runtime, device, min(streams, _MOST_PREPARED))
    with entered(device), enough_memory(device):
        stages = Assembly(context, config, stream).stages(names)
        # Called last, so that the memory which only the load needs is returned.
        keep_freed_memory(device)
        return stages


def cache_pages(context: LoadContext, page_bytes: int) -> int:
    """Returns the number of pages of the cache that the settings or the free memory allow."""
    return cache_bytes(context.runtime.cache_mib, context.device) // page_bytes


def check_runtime(
    folder: Path, config: ModelConfig, stream: StreamConfig, runtime: RuntimeConfig
) -> None:
    """Raises ConfigError if this machine lacks the device, memory or backend of the settings, or if
    a setting does not fit the model. Loads no weights.
    """
    context = LoadContext(folder, runtime, device_named(runtime.device))
    with entered(context.device):
        _check_sizes(context, config, stream)
        # `auto` never fails: it falls back to torch
        if runtime.backend != "auto" or stream.reference:
            _backend_of(context, config, stream)


def _check_sizes(context: LoadContext, config: ModelConfig, stream: StreamConfig) -> None:
    """Checks the settings of streams against the networks, which are made without weights."""
    family = family_for(config)
    with torch.device("meta"):
        last = family.network(config, config.stages[-1])
        flow = family.network(config, "flow") if "flow" in config.stages else None
    if isinstance(last, WaveformNetwork):
        last.check_attributes()
        check_lookahead_frames(config.withheld_frames(stream), last)
    if flow is not None and family.paged_flow and not stream.reference:
        steps = max(config.allowed_steps(stream.steps))
        page = _layout(config, flow, steps, context.cache_storage)[1]
        check_pages(config, stream, cache_pages(context, page))


def _layout(config: Any, flow: Any, steps: int, storage: Storage) -> tuple[CacheLayout, int]:
    """Returns the layout of the cache of a flow, and the bytes of a page with the encoder's share.
    `steps` is the largest number of ODE steps.
    """
    layout = CacheLayout.of(config, flow.estimator, config.flow.inference_cfg_rate, steps, storage)
    return layout, layout.page_bytes + page_bytes(flow.key_value_specs, config.block_tokens)


def check_folder(folder: Path) -> None:
    """Raises Token2WavError if a model folder cannot be served. Reads configuration and weights
    without putting anything on a device.
    """
    config = read_config(folder)
    family = family_for(config)
    for stage in config.stages:
        _read_network(family, folder, config, stage)
        family.noise(config, folder, stage)


def load_network(folder: Path, config: ModelConfig, stage: StageName) -> Any:
    """Loads the network of a stage in float32 on the CPU, ready for inference.

    Raises:
        CheckpointError: weights are missing, unreadable, or do not fit the configuration.
    """
    network, weights = _read_network(family_for(config), folder, config, stage)
    fill(network, weights)
    if isinstance(network, WaveformNetwork):
        network.freeze()
    return network.eval().requires_grad_(False)


def flow_networks(config: Any, storage: Storage) -> FlowNetworks:
    """Makes the networks of a flow decoder without weights, on torch's default device; raises
    ConfigError if the model has no flow with a cache. `storage` is the dtype of keys and values.
    """
    if not config.ode_steps:
        raise ConfigError(
            "flow: the model has no flow with a cache, which a plan or an export needs"
        )
    family = family_for(config)
    flow: Any = family.network(config, "flow")
    vocoder: Any = family.network(config, "vocoder")
    layout, page = _layout(config, flow, config.ode_steps, storage)
    guidance = config.flow.inference_cfg_rate
    return FlowNetworks(flow, vocoder, layout, guidance, config.schedule, page)


def withheld_samples(config: ModelConfig, stream: StreamConfig) -> int:
    """Returns `Stage.withheld_samples` of the last stage, without loading weights."""
    with torch.device("meta"):
        network: Any = family_for(config).network(config, config.stages[-1])
    return int(config.withheld_frames(stream) * network.frame_samples or network.output_delay)


class Assembly:
    """Assembly of one model on one device."""

    def __init__(self, context: LoadContext, config: Any, stream: StreamConfig) -> None:
        self.context, self.config, self.stream = context, config, stream
        self.family = family_for(config)
        # Chosen before weights are loaded, because the backend of the settings may be unavailable.
        self.backend = _backend_of(context, config, stream)
        device = context.device
        self.pool = GraphPool(device) if graphs_enabled(device) else None

    @property
    def _half_convolution_inputs(self) -> bool:
        return self.context.runtime.decoder_precision == "float16"

    def stages(self, names: Sequence[StageName] = ()) -> Stages:
        """Makes the stages `names`, by default all stages.

        The last stage is made first, because the cache of the flow takes a share of the memory that
        the vocoder leaves.
        """
        keep_arithmetic_exact(self.context.device)
        keep_compiled_operations(self.context.device)
        precision: str = self.context.precision
        if "decoder" in self.config.stages:
            rounded = self.context.runtime.decoder_precision
            precision = "float32" if self.config.ode_steps else rounded  # a flow is not rounded
        summary = StageSummary(
            self.backend.name,
            precision,
            str(self.context.device),
            self.backend.most_streams,
            self.pool.summary if self.pool else GraphSummary(),
        )
        names = names or self.config.stages
        if self.backend.name == "pause":
            return Stages({name: self._pause_stage(name) for name in names}, summary)
        networks = {
            name: load_network(self.context.folder, self.config, name).to(self.context.device)
            for name in names
        }
        stages = {name: self._stage(name, networks[name]) for name in reversed(names)}
        return Stages({name: stages[name] for name in names}, summary)

    def _pause_stage(self, name: StageName) -> Stage[Any]:
        """Makes a stage that computes nothing. The first stage of the model takes the time."""
        runtime, held = self.context.runtime, self.config.withheld_frames(self.stream)
        pause = Pause(runtime.pause_batch_ms, runtime.pause_token_ms)
        if name == "flow":
            return PauseFlow(self.config, pause)
        with torch.device("meta"):
            network: Any = self.family.network(self.config, name)
        return PauseVocoder(network, held, pause if name == "decoder" else None)

    def _stage(self, name: StageName, network: Any) -> Stage[Any]:
        noise: Any = self.family.noise(self.config, self.context.folder, name)
        solvers: dict[int, EulerSolver] = {}
        provisional_tables: dict[int, OdeTables] = {}
        if name == "flow" and self.config.ode_steps:
            solvers, provisional_tables = self._schedules(network)
        kernels = self.pool is not None and gpu_runs_kernels(self.context.device)
        round_products(network, self._product_precision(name, network, kernels))
        longest_hop = self.config.hops(self.stream)[1]
        if kernels:
            # imported here, because a machine without kernels may lack the Triton language
            from token2wav.kernels.layer_kernels import set_kernels

            set_kernels(network)
        if name == "decoder" and network.packs_linears:
            pack_linears(network)
        special_stage = self.family.own_stage(
            StageParts(self.config, name, network, noise, solvers, longest_hop, self.pool, kernels)
        )
        if special_stage is not None:
            return special_stage
        if name == "flow":
            return self._flow_stage(network, noise, solvers, provisional_tables)
        return self._vocoder_stage(name, network, noise)

    def _product_precision(
        self, name: StageName, network: nn.Module, kernels: bool
    ) -> DecoderPrecision:
        """Returns the rounding of the operands of convolutions that torch multiplies: those of
        codecs, and of BigVGAN on a GPU. Kernels multiply those of HiFT.
        """
        if name == "decoder":
            return self.context.runtime.decoder_precision
        if isinstance(network, BigVGAN) and kernels and self.context.precision == "float16":
            return "float16" if self._half_convolution_inputs else "float16x3"
        return "float32"

    def _schedules(self, flow: Any) -> tuple[dict[int, EulerSolver], dict[int, OdeTables]]:
        """Makes the solvers of a flow, and the tables for its provisional chunks, both by number of
        ODE steps of a stream.

        The tables hold all results that depend on the ODE time alone. The weights that the tables
        replace are then dropped from the estimator.
        """
        config, guidance = self.config, self.config.flow.inference_cfg_rate
        allowed = config.allowed_steps(self.stream.steps)
        solvers = {
            steps: EulerSolver(flow.estimator, steps, guidance, config.schedule)
            for steps in allowed
        }
        provisional_tables = {
            steps: OdeTables.of(flow.estimator, steps, guidance, config.schedule, evaluated)
            for steps in allowed
            if (evaluated := config.provisional_steps(self.stream, steps)) < steps
        }
        flow.estimator.drop_time_weights()
        if self.context.precision == "float16":
            flow.estimator.halve()
            flow.estimator.half_convolution_inputs = self._half_convolution_inputs
        return solvers, provisional_tables

    def _flow_stage(
        self,
        flow: Any,
        noise: FlowNoise,
        solvers: dict[int, EulerSolver],
        provisional_tables: dict[int, OdeTables],
    ) -> FlowStage[Any]:
        """Makes the incremental stage of a flow.

        A page of its cache has room for the largest number of ODE steps.

        Args:
            provisional_tables: tables for provisional chunks by number of ODE steps of their
                streams. A number that is missing has no provisional chunks, or they have as many
                steps as all chunks.
        """
        context, config, hop = self.context, self.config, self.config.hops(self.stream)[1]
        window, reference = config.window(self.stream), self.family.reference
        if self.stream.reference and reference is not None:
            options = {"full_tail": reference.full_tail, "windows": reference.windows}
            return RecomputeFlow(config, flow, noise, solvers, left_blocks=window, **options)
        recompute = RecomputeFlow(config, flow, noise, solvers, left_blocks=window)
        layout, per_page = _layout(config, flow, max(solvers), context.cache_storage)
        # The states are allocated first, so that the cache takes its share of the rest. No more
        # streams can be open than there are pages.
        count = min(context.streams, cache_pages(context, per_page))
        states = flow_states(flow, flow.estimator, layout, count)
        pages = cache_pages(context, per_page)
        check_pages(config, self.stream, pages)
        cache = PagedKVCache(layout, pages, context.device)
        longest = hop // config.block_tokens
        with torch.inference_mode():
            make = partial(flow_runner, kernel_step=self.family.kernel_step, pool=self.pool)
            runners = {
                steps: make(self.backend, (flow.estimator, solver.tables, cache), states, longest)
                for steps, solver in solvers.items()
            }
            provisional_runners = {
                steps: make(self.backend, (flow.estimator, tables, cache), states, provisional=True)
                for steps, tables in provisional_tables.items()
            }
        keys = encoder_cache(flow, config.block_tokens, cache)
        return CachedFlow(
            recompute,
            runners,
            cache,
            states,
            provisional_runners=provisional_runners,
            encoder_runner=encoder_runner(flow, keys, states, config.block_tokens, self.pool),
            longest_hop=hop,
        )

    def _vocoder_stage(
        self, name: StageName, vocoder: WaveformNetwork, noise: SourceNoise | None
    ) -> WaveformStage | RecomputeVocoder:
        """Makes the stage of a vocoder or of a codec decoder."""
        reference = self.family.reference
        if self.stream.reference and reference is not None and reference.recomputes_audio:
            return RecomputeVocoder(vocoder, noise, "reference")
        # Under `stream.reference` the hop may be a whole utterance, too long to prepare.
        stream = replace(self.stream, reference=False)
        exported = None
        if self.backend.vocoder:
            exported = ExportedVocoder(self.backend.vocoder, vocoder, signals_of(name, vocoder))
        pool = None if exported else self.pool
        hops = self.config.hops(stream)
        kernels = None if exported else self._vocoder_kernels(vocoder, hops)
        prepared = pool is not None and kernels is None
        shapes = likely_pieces(vocoder, self.config, hops, CAPTURED_STREAMS) if prepared else []
        return WaveformStage(
            vocoder,
            noise,
            exported,
            shapes=shapes,
            graphs=pool,
            kernels=kernels,
            lookahead_frames=self.config.withheld_frames(stream),
            streams=self.context.streams,
        )

    def _vocoder_kernels(
        self, vocoder: WaveformNetwork, hops: tuple[int, int]
    ) -> Callable[[NoiseTable, int], KernelPieces] | None:
        """Returns the maker of the runner of a vocoder on kernels; None if it cannot run on
        kernels.
        """
        device = self.context.device
        if self.pool is None or not isinstance(vocoder, HiFT) or not gpu_runs_kernels(device):
            return None
        # imported here, because a machine without kernels may lack the Triton language
        from token2wav.kernels.hift_plan import HiFTPlan
        from token2wav.kernels.rounding import precision_beside
        from token2wav.stages.kernel_pieces import kernel_pieces

        dtype = torch.float16 if self.context.precision == "float16" else torch.float32
        precision = precision_beside(dtype, half_inputs=self._half_convolution_inputs)
        plan = HiFTPlan(vocoder, precision)
        sizes = kernel_sizes(vocoder.lookahead_frames, self.config, hops)
        log.info("the vocoder runs on kernels in %d CUDA graphs", len(sizes))
        return partial(kernel_pieces, plan, sizes, self.pool)


def _read_network(
    family: Family, folder: Path, config: ModelConfig, stage: StageName
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    path = weights_file(folder, config.weights_names(stage))
    with SkipInit(path):
        network = family.network(config, stage)
    return network, family.weights(network, path, stage)


def _backend_of(context: LoadContext, config: ModelConfig, stream: StreamConfig) -> Backend:
    """Chooses the backend of a model; raises ConfigError as `choose`, or if the family has no
    reference loop for `stream.reference`.
    """
    family = family_for(config)
    if stream.reference and family.reference is None:
        raise ConfigError("stream.reference: not supported by this family; remove the setting")
    torch_only = "stream.reference" if stream.reference else ""
    if context.runtime.backend != "pause":  # a pause runs no network
        torch_only = torch_only or family.torch_only
        if stream.block_tokens and not torch_only:  # graphs are exported for the block of the model
            torch_only = "stream.block_tokens"
        if "decoder" in config.stages and context.runtime.decoder_precision != "float32":
            torch_only = torch_only or "runtime.decoder_precision"
    return choose(context, config.stages, torch_only=torch_only)
