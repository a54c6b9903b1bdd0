"""Section floor: what this device was measured to do, and the least that chunks can take on it."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.gpu.floor import Rates, as_row, flow_work, vocoder_work
from benchmarks.gpu.rates import measure
from benchmarks.gpu.records import Record
from benchmarks.gpu.settings import PROMPT_TOKENS, Settings
from token2wav.flow.cache import CacheLayout
from token2wav.hift_config import HiFTConfig
from token2wav.model_config import ModelConfig

_STREAMS = (1, 64)
_HOP = 25


def floor(folder: Path, settings: Settings, record: Record) -> None:
    """Writes the rates, and the floor of chunks of 25 tokens after each history."""
    device = torch.device(settings.device)
    measured = measure(device, settings.copy_mib, settings.matrix)
    for name, value in measured.items():
        record.put(name, value)
    config, rates = ModelConfig.read(folder), Rates.of(measured)
    assert isinstance(config.vocoder, HiFTConfig)  # as all models of the report have
    ratio = config.flow.token_mel_ratio
    precision = settings.exact_precision
    layout = CacheLayout.of(config.flow, precision)
    bandwidth, products = (
        rates.bandwidth / 1e12,
        {name: rate / 1e12 for name, rate in measured["operations_per_s"].items()},
    )
    print(f"{bandwidth:.3f} TB/s; " + ", ".join(f"{name} {rate:.2f} TFLOP/s" for name, rate in products.items()))
    for streams in _STREAMS:
        for spoken_s in settings.spoken_s:
            past = ratio * (round(25 * spoken_s) + PROMPT_TOKENS)
            flow = flow_work(config.flow, layout, precision, streams, ratio * _HOP, past)
            row = as_row(flow, vocoder_work(config.vocoder, streams, ratio * _HOP), rates)
            record.add("rows", {"streams": streams, "spoken_s": spoken_s, "hop_tokens": _HOP, **row})
            print(f"{streams:4} streams {spoken_s:5g} s {_HOP:4} tokens: floor {row['floor_ms']:.3f} ms", flush=True)
