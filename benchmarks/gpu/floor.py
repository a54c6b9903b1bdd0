"""Section floor: bandwidth and arithmetic rates of this device, and the least cost of a chunk.

Weights are read once per ODE step, because they do not fit a GPU's on-chip memory. Weights outside
the loop are read once per call. In every step, a chunk reads the keys and values of all frames that
it attends to once, and writes its own. Products, convolutions and attention count as arithmetic;
elementwise operations do not. Reading and computing can overlap, so the longer of both counts. Flow
and vocoder run one after the other, so their times add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.settings import PROMPT_TOKENS, Row, Rows, Settings
from token2wav.assembly import flow_networks
from token2wav.cache.paged_kv_cache import CacheLayout
from token2wav.exported.artifacts import Precision
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.networks.configs import HiFTConfig
from token2wav.networks.hift import HiFT

_SECONDS = 0.2  # least duration of each measurement
_COUNTED_FRAMES = 50


@dataclass(frozen=True)
class Work:
    """Least cost of one batch: bytes read and written, and operations by precision."""

    bytes: float = 0.0
    half: float = 0.0
    single: float = 0.0
    double: float = 0.0

    def ms(self, rates: Mapping[str, float]) -> float:
        """Returns the longer of reading and computing, in ms, at the rates of section floor."""
        arithmetic = (
            self.half / rates["float16"]
            + self.single / rates["float32"]
            + self.double / rates["float64"]
        )
        return 1000 * max(self.bytes / max(rates["copy"], rates["triad"]), arithmetic)


def floor(folder: Path, settings: Settings, done: Mapping[str, Row]) -> Rows:
    """Measures bytes and operations per second, the best of several calls each.

    The best call counts, because no measurement may beat a floor.
    """

    def measure() -> Row:
        device, size, elements = (
            torch.device(settings.device),
            settings.matrix,
            (settings.copy_mib << 20) // 4,
        )
        a, b, c = (torch.ones(elements, device=device) for _ in range(3))
        rates = {"copy": 8 * elements / _best_seconds(lambda: b.copy_(a))}
        rates["triad"] = 12 * elements / _best_seconds(lambda: torch.add(a, b, alpha=2.0, out=c))
        for name in ("float16", "tf32", "float32", "float64"):
            dtype = getattr(torch, name.replace("tf32", "float32"))
            x, y = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            rates[name] = (
                2.0 * size**3 / _best_seconds(partial(torch.mm, x, y, out=torch.empty_like(x)))
            )
        return {"rates": rates, "copy_mib": settings.copy_mib, "matrix": size}

    yield "rates", measure


def _best_seconds(work: Callable[[], object]) -> float:
    return min(
        Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=_SECONDS).times
    )


def floor_ms(
    config: CosyVoice3Config, precision: Precision, rates: Mapping[str, float], row: Row
) -> float:
    """Returns the floor in ms of a row of section chunks."""
    ratio, streams, vocoder = config.token_mel_ratio, row["streams"], config.vocoder
    assert isinstance(vocoder, HiFTConfig)  # as all models of the report have
    past = (
        round(25 * row["spoken_s"]) + PROMPT_TOKENS
        if row["spoken_s"]
        else config.grid(PROMPT_TOKENS).prefix
    )
    flow = flow_work(config, precision, streams, ratio * row["computed_tokens"], ratio * past)
    return flow.ms(rates) + vocoder_work(vocoder, streams, ratio * row["hop_tokens"]).ms(rates)


def flow_work(
    model: CosyVoice3Config, precision: Precision, streams: int, frames: int, past: int
) -> Work:
    """Returns the work of all ODE steps for chunks of mel frames.

    `past` frames come before the chunk, with the prompt. The input layer of the estimator stays in
    float32, for every precision of the other layers and of the cache.
    """
    config, (layout, layers, inputs, conditions) = model.flow, estimator_sizes(model, precision)
    rows = streams * layout.branches * frames
    pairs = streams * layout.branches * attended_pairs(frames, past, layout.block_frames)
    product = (
        2.0
        * layout.steps
        * (rows * layers + 2 * layout.layers * pairs * layout.heads * layout.dim_head)
    )
    tokens = streams * frames / config.token_mel_ratio
    ahead = (
        config.pre_lookahead_channels
        * config.input_size
        * (config.pre_lookahead_len + config.lookbehind_len + 2)
    )
    outside = 2.0 * (rows * (layout.steps * inputs + conditions) + tokens * ahead)
    half = precision == "float16"
    weights = layout.steps * (layers * (2 if half else 4) + inputs * 4) + 4 * (conditions + ahead)
    pages = streams * (past + frames) / layout.block_frames
    return Work(
        weights + pages * layout.page_bytes,
        product if half else 0.0,
        outside + (0.0 if half else product),
    )


def attended_pairs(frames: int, past: int, block: int) -> int:
    """Counts the pairs of query and key in a chunk of new frames after `past` frames.

    The queries of a block attend to no later block.
    """
    ends = range(block, frames + block, block)
    return sum((min(end, frames) - (end - block)) * (past + min(end, frames)) for end in ends)


@cache
def estimator_sizes(
    config: CosyVoice3Config, storage: Precision
) -> tuple[CacheLayout, int, int, int]:
    """Returns the layout of the cache and the numbers of weights, without biases and time weights.

    Every step reads the weights of the layers, and the weights of the input layer except for the
    conditions. The weights that project the conditions are read once for all steps.
    """
    with torch.device("meta"):
        networks = flow_networks(config, storage)
    networks.flow.estimator.drop_time_weights()
    counts = {
        name: weight.numel()
        for name, weight in networks.flow.estimator.named_parameters()
        if weight.dim() > 1
    }
    inputs = sum(number for name, number in counts.items() if name.startswith("input_embed"))
    projected = counts["input_embed.proj.weight"]
    conditions = projected - config.flow.estimator.dim * config.mel_bands
    return networks.layout, sum(counts.values()) - inputs, inputs - conditions, conditions


@cache
def vocoder_work(config: HiFTConfig, streams: int, frames: int) -> Work:
    """Returns the work of HiFT in float32, with its F0 predictor in float64.

    Only the new frames count, because streaming repeats no window.
    """
    counted = _COUNTED_FRAMES
    with torch.device("meta"):
        hift = HiFT(config)
        hift.freeze()
        with FlopCounterMode(display=False) as single:
            mel = torch.empty(1, config.in_channels, counted)
            hift.decode(mel, torch.empty(1, 1, counted * config.samples_per_frame))
        with FlopCounterMode(display=False) as double:
            hift.f0_predictor(torch.empty(1, config.in_channels, counted, dtype=torch.float64))
    share = streams * frames / counted
    size = sum(weight.numel() * weight.element_size() for weight in hift.parameters())
    return Work(size, 0.0, share * single.get_total_flops(), share * double.get_total_flops())
