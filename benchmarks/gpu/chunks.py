"""Sections chunks, drift and recompute: how long a chunk takes, by batch, history and length, and where time goes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.chunk_batch import ChunkBatch
from benchmarks.gpu.settings import PROMPT_TOKENS, LeftOut, Row, Rows, Settings
from token2wav import StreamConfig, Token2Wav, Voice
from token2wav.model_config import ModelConfig

_RESERVED_PAGES = 3  # that a stream takes when it opens
_FIRST_DRIFTING = 3  # chunk, counted from 1: what comes before has another length, or warms up
_TOP = 40
_MOST_TRACE_BYTES = 4_000_000


def a_voice(flow: ModelConfig, seed: int = 1, prompt_tokens: int = PROMPT_TOKENS) -> Voice:
    """Random voice that fits a model."""
    random = np.random.default_rng(seed)
    mel = random.standard_normal((flow.token_mel_ratio * prompt_tokens, flow.mel_bands))
    tokens, speaker = random.integers(0, flow.vocab_size, prompt_tokens), random.standard_normal(flow.speaker_size)
    return Voice(tokens, mel, speaker)


def load(folder: Path, settings: Settings, stream: StreamConfig | None = None, **runtime: Any) -> tuple[Token2Wav, Row]:
    """The model as sections run it, and what loading took: seconds, captured graphs included, and memory."""

    def free_mib() -> int:
        return torch.cuda.mem_get_info(settings.device)[0] >> 20 if settings.on_gpu else 0

    began, free = time.monotonic(), free_mib()
    model = Token2Wav.load(folder, stream=stream, runtime=settings.runtime(**runtime))
    usage = model.pipeline.flow.usage()
    cache = usage.capacity * usage.page_bytes >> 20
    row = {"load_s": round(time.monotonic() - began, 1), "cache_mib": cache}
    return model, row | ({"other_mib": free - free_mib() - cache} if settings.on_gpu else {})


def chunks(folder: Path, settings: Settings, done: Mapping[str, Row]) -> Rows:
    """Chunks from the cache, in one batch; a profile of the first chunk of one stream, and of the largest batch."""
    model, loaded = load(folder, settings)
    yield "the model", lambda: loaded
    for streams in settings.batches:
        places = [(spoken_s, hop) for spoken_s in settings.histories for hop in settings.hops]
        for number, (spoken_s, hop) in enumerate([(0.0, settings.hops[0]), *places]):
            yield chunk_key(streams, hop, spoken_s), partial(chunk, model, settings, streams, hop, spoken_s)
            if not number and streams in (1, max(settings.batches)):
                at = 0.0 if streams == 1 else settings.histories[0]
                yield f"profile of {streams} streams after {at:g} s", partial(profiled, model, settings, streams, at)


def chunk_key(streams: int, hop: int, spoken_s: float) -> str:
    return f"{streams} streams, {hop} tokens after {spoken_s:g} s"


def chunk(model: Token2Wav, settings: Settings, streams: int, hop: int, spoken_s: float) -> Row:
    """Times in ms of flow, vocoder and both for a chunk of each stream, in one batch: median, least and most."""
    times, computed = [], 0
    for _ in range(settings.repeats + 1):
        with spoken(model, streams, round(25 * spoken_s), hop) as batch:
            times.append(batch.advance(hop))
            computed = batch.new_tokens
    flow, vocoder = (1000 * np.array(each) for each in zip(*times[1:], strict=True))
    history_s = spoken_s + PROMPT_TOKENS / 25 if spoken_s else 0.0
    row: Row = {"streams": streams, "hop_tokens": hop, "spoken_s": spoken_s, "history_s": history_s}
    for name, each in (("flow_ms", flow), ("vocoder_ms", vocoder), ("total_ms", flow + vocoder)):
        row[name] = [round(float(value), 3) for value in (np.median(each), each.min(), each.max())]
    return row | {"computed_tokens": computed}


@contextmanager
def spoken(model: Token2Wav, streams: int, tokens: int, hop: int) -> Iterator[ChunkBatch]:
    """Streams that have spoken so many tokens; left out where they would not all stay in the cache with another hop.

    A stream that finds no page goes on by recomputing, which is another measurement.
    """
    if problem := shortage(model, streams, tokens + hop):
        raise LeftOut(problem)
    with ChunkBatch(model, streams, a_voice(model.config)) as batch:
        while batch.spoken_tokens < tokens:
            batch.advance(min(100, tokens - batch.spoken_tokens) if batch.spoken_tokens else 25)
        yield batch


def shortage(model: Token2Wav, streams: int, spoken_tokens: int) -> str | None:
    """Why so many streams of such a length would not all stay in the cache; None if they would."""
    usage, flow = model.pipeline.flow.usage(), model.config
    own = PROMPT_TOKENS - flow.prefix_tokens(PROMPT_TOKENS) + spoken_tokens
    prompt_pages = flow.prefix_tokens(PROMPT_TOKENS) // flow.block_tokens
    needed = prompt_pages + streams * max(_RESERVED_PAGES, -(-own // flow.block_tokens))
    if not usage.capacity or needed <= usage.capacity:
        return None
    return f"needs {needed} pages of {usage.page_bytes / 1e6:.1f} MB, and the cache has {usage.capacity}"


def drift(folder: Path, settings: Settings, done: Mapping[str, Row]) -> Rows:
    """Chunks of one stream under a window, from the third to the last; medians of several streams."""
    model, _ = load(folder, settings, StreamConfig(left_blocks=settings.drift_window))

    def measure() -> Row:
        times = []
        for _ in range(settings.repeats + 1):
            with ChunkBatch(model, 1, a_voice(model.config)) as batch:
                times.append([1000 * sum(batch.advance(25)) for _ in range(settings.drift_chunks)])
        medians = np.median(times[1:], axis=0).round(3).tolist()
        third, last = medians[_FIRST_DRIFTING - 1], medians[-1]
        values = {"third_ms": third, "last_ms": last, "drift": round(last / third - 1, 4), "chunk_ms": medians}
        return {"chunks": len(medians), **values}

    yield "chunks of 25 tokens", measure


def recompute(folder: Path, settings: Settings, done: Mapping[str, Row]) -> Rows:
    """Chunks as public servers compute them: the whole history anew, one request at a time."""
    model, _ = load(folder, settings, StreamConfig(reference=True))
    hop = settings.hops[-1]
    for spoken_s in settings.histories:
        yield chunk_key(1, hop, spoken_s), partial(chunk, model, settings, 1, hop, spoken_s)


def profiled(model: Token2Wav, settings: Settings, streams: int, spoken_s: float) -> Row:
    """Kernels of one chunk (on a CPU operators) by their time; writes a trace beside the results."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if settings.on_gpu else [])]
    with spoken(model, streams, round(25 * spoken_s), 25) as batch, profile(activities=activities) as profiler:
        wall_ms = 1000 * sum(batch.advance(25))
    trace = settings.out / f"trace-{streams}.json.gz"
    profiler.export_chrome_trace(str(trace))
    if trace.stat().st_size > _MOST_TRACE_BYTES:
        trace.unlink()
    kind = "CUDA" if settings.on_gpu else "CPU"
    events = [each for each in profiler.events() or [] if each.device_type.name == kind and not each.is_user_annotation]
    spans = [(each.name, each.time_range.start / 1000, each.time_range.end / 1000) for each in events]
    return {"streams": streams, "spoken_s": spoken_s, "wall_ms": round(wall_ms, 3)} | summary(spans)


def summary(spans: Iterable[tuple[str, float, float]]) -> Row:
    """Longest kernels of spans (name, begin, end in ms), their sum, and the time between them in which none runs."""
    calls, by_name = Counter[str](), defaultdict[str, float](float)
    idle_ms, until = 0.0, None
    for name, begin, end in sorted(spans, key=itemgetter(1)):
        calls[name] += 1
        by_name[name] += end - begin
        idle_ms += max(0.0, begin - until) if until is not None else 0.0
        until = max(until or end, end)
    longest = sorted(by_name.items(), key=itemgetter(1), reverse=True)[:_TOP]
    return {
        "kernels_ms": round(sum(by_name.values()), 3),
        "idle_ms": round(idle_ms, 3),
        "calls": calls.total(),
        "kernels": [{"name": name[:120], "ms": round(ms, 4), "calls": calls[name]} for name, ms in longest],
    }
