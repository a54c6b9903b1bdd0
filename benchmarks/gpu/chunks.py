"""Sections chunks and drift: time of a chunk by batch, history and length; profiles."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.chunk_batch import ChunkBatch, chunk, chunk_key, spoken
from benchmarks.gpu.settings import LeftOut, Row, Rows, Settings
from testkit.models.sized import a_voice
from token2wav import StreamConfig, Token2Wav
from token2wav.backends import FLOAT8_CAPABILITY


def load(
    folder: Path, settings: Settings, stream: StreamConfig | None = None, **runtime: Any
) -> tuple[Token2Wav, Row]:
    """Loads a model for a section. Raises LeftOut if the GPU cannot store the cache in float8.

    Returns:
        The model, and a row with the seconds of loading (including the capture of graphs), the
            size of the cache in MiB, and the CUDA graphs with their nodes, memory and seconds of
            capture.
    """
    if settings.on_gpu and runtime.get("cache_storage") == "float8":
        capability = torch.cuda.get_device_capability(settings.device)
        if capability < FLOAT8_CAPABILITY:
            raise LeftOut(f"float8 on a GPU of compute capability {capability}")
    began = time.monotonic()
    model = Token2Wav.load(folder, stream=stream, runtime=settings.runtime(**runtime))
    usage = model.pipeline.flow.usage()
    cache = usage.capacity * usage.page_bytes >> 20
    row = {"load_s": round(time.monotonic() - began, 1), "cache_mib": cache}
    graphs = model.summary.graphs
    return model, row | {
        "graphs": graphs.graphs,
        "graph_nodes": graphs.nodes,
        "graph_mib": graphs.memory >> 20,
        "graph_s": round(graphs.seconds, 1),
    }


def chunks(folder: Path, settings: Settings) -> Rows:
    """Measures chunks from the cache, in one batch.

    Also profiles the first chunk of one stream, and a chunk of the largest batch.
    """
    storage = settings.storage
    pages = "" if storage == "auto" else f", {storage} pages"
    halved = "" if settings.decoder_precision == "float32" else ", convolutions in float16"
    model, loaded = load(folder, settings, cache_storage=storage)
    yield f"the model{pages}{halved}", lambda: loaded
    for streams in settings.batches:
        cases = [(spoken_s, hop) for spoken_s in settings.histories for hop in settings.hops]
        for number, (spoken_s, hop) in enumerate([(0.0, settings.hops[0]), *cases]):
            yield (
                chunk_key(streams, hop, spoken_s, storage) + halved,
                partial(chunk, model, settings.repeats, streams, hop, spoken_s, settings.repeat_s),
            )
            if not number and streams in (1, max(settings.batches)):
                at = 0.0 if streams == 1 else settings.histories[0]
                yield (
                    f"profile of {streams} streams after {at:g} s{pages}{halved}",
                    partial(profiled_chunk, model, settings, streams, at),
                )


def drift(folder: Path, settings: Settings) -> Rows:
    """Measures the chunks of one stream with an attention window, from the third to the last.

    The times are medians over several streams.
    """
    model, _ = load(
        folder, settings, StreamConfig(first_tokens=0, left_blocks=settings.drift_window)
    )

    def measure() -> Row:
        times = []
        for _ in range(settings.repeats + 1):
            with ChunkBatch(model, 1, a_voice(model.config)) as batch:
                times.append([1000 * sum(batch.advance(25)) for _ in range(settings.drift_chunks)])
        medians = np.median(times[1:], axis=0).round(3).tolist()
        third, last = medians[2], medians[-1]  # the first two differ or warm up
        values = {
            "third_ms": third,
            "last_ms": last,
            "drift": round(last / third - 1, 4),
            "chunk_ms": medians,
        }
        return {"chunks": len(medians), **values}

    yield "chunks of 25 tokens", measure


def profiled_chunk(model: Token2Wav, settings: Settings, streams: int, spoken_s: float) -> Row:
    with spoken(model, streams, round(25 * spoken_s), 25) as batch:
        row = profiled(partial(batch.advance, 25), settings, str(streams))
    return {"streams": streams, "spoken_s": spoken_s} | row


def profiled(run: Callable[[], object], settings: Settings, name: str) -> Row:
    """Lists the kernels of a call by their time, or the operators on a CPU.

    Also writes a trace beside the results.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if settings.on_gpu else [])]
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        run()
        wall_ms = 1000 * (time.perf_counter() - began)
    trace = settings.out / f"trace-{name}.json.gz"
    profiler.export_chrome_trace(str(trace))
    if trace.stat().st_size > 4_000_000:  # too large to copy from machine to machine
        trace.unlink()
    kind = "CUDA" if settings.on_gpu else "CPU"
    kernels = [
        {
            "name": event.key[:120],
            "ms": round(_own_us(event, kind) / 1000, 4),
            "calls": event.count,
        }
        for event in profiler.key_averages()
        if event.device_type.name == kind and not event.is_user_annotation
    ]
    return {
        "wall_ms": round(wall_ms, 3),
        "kernels_ms": round(sum(kernel["ms"] for kernel in kernels), 3),
        "calls": sum(kernel["calls"] for kernel in kernels),
        "kernels": sorted(kernels, key=itemgetter("ms"), reverse=True)[:40],
    }


def _own_us(event: Any, kind: str) -> float:
    return float(event.self_device_time_total if kind == "CUDA" else event.self_cpu_time_total)
