"""Section chunks: how long a chunk takes, by batch, history and length, beside the floor; and whether that drifts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.chunk_batch import ChunkBatch
from benchmarks.engines import Case, Row, export, spread
from benchmarks.gpu.device import release
from benchmarks.gpu.floor import Rates, as_row, flow_work, vocoder_work
from benchmarks.gpu.rates import measure
from benchmarks.gpu.records import Record, read_records
from benchmarks.gpu.settings import PROMPT_TOKENS, Settings
from benchmarks.streaming_cost import prompt
from token2wav import StreamConfig, Token2Wav
from token2wav.flow.cache import CacheLayout
from token2wav.hift_config import HiFTConfig

Timed = tuple[float, float, int]  # seconds of flow and vocoder, and tokens that the flow computed of every stream

_FIRST_DRIFTING = 3  # chunk, counted from 1: what comes before has another length, or warms up
_RESERVED_PAGES = 3  # that a stream takes when it opens


def chunks(folder: Path, settings: Settings, record: Record) -> None:
    """Writes `results` (as benchmarks.engines does, for `token2wav-plan`), `rows`, `missing`, and `drift`."""
    rates = known_rates(settings)
    model = load(folder, settings)
    case = Case(model.engine.name, model.engine.precision)
    rows: list[dict[str, Any]] = []
    for streams in settings.batches:
        for found in of_batch(model, streams, settings):
            if "problem" in found:
                record.add("missing", found)
                print(f"{streams} streams, {found['spoken_s']:g} s: {found['problem']}", flush=True)
                continue
            row = found | floor_of(model, found, rates)
            rows.append(row)
            record.add("rows", row)
            record.put("results", [{"model": settings.size, "case": asdict(case), "rows": rows}])
            print(as_line(row), flush=True)
    del model
    release(torch.device(settings.device))
    record.put("drift", drift(folder, settings))


def load(folder: Path, settings: Settings, stream: StreamConfig | None = None, **runtime: Any) -> Token2Wav:
    """The model as a section runs it, its graphs exported if it needs any."""
    prepare(folder, settings)
    return Token2Wav.load(folder, stream=stream, runtime=settings.runtime(**runtime))


def prepare(folder: Path, settings: Settings) -> None:
    """Exports the graphs that the engine needs and that are not there."""
    export(folder, Case(settings.engine, settings.exact_precision))


def known_rates(settings: Settings) -> Rates:
    """Those of section floor on this device, or new ones."""
    device = torch.device(settings.device)
    found = read_records(settings.out, ["floor"]).get("floor", {})
    if found.get("device") == settings.device and "operations_per_s" in found:
        return Rates.of(found)
    return Rates.of(measure(device, settings.copy_mib, settings.matrix))


def of_batch(model: Token2Wav, streams: int, settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for a first chunk and for every history and hop; `problem` in place of times where there is no memory."""
    for hop in settings.hops:
        histories = []
        for spoken_s in ((0.0,) if hop == settings.hops[0] else ()) + settings.spoken_s:
            if problem := shortage(model, streams, round(25 * spoken_s) + hop):
                yield {"spoken_s": spoken_s, "hop_tokens": hop, "streams": streams, "problem": problem}
            else:
                histories.append(spoken_s)
        times, problems = passes(model, streams, hop, histories, settings.repeats)
        for spoken_s, problem in problems.items():
            yield {"spoken_s": spoken_s, "hop_tokens": hop, "streams": streams, "problem": problem}
        for spoken_s, each in times.items():
            flow, vocoder, lengths = zip(*each, strict=True)
            history_s = spoken_s + PROMPT_TOKENS / 25 if spoken_s else 0.0
            row = asdict(Row(history_s, hop, streams, spread(flow), spread(vocoder)))
            total = spread(tuple(np.add(flow, vocoder).tolist()))
            yield row | {"spoken_s": spoken_s, "computed_tokens": lengths[0], "total_ms": total}


def shortage(model: Token2Wav, streams: int, spoken_tokens: int) -> str | None:
    """Why so many streams of such a length would not all stay in the cache; None if they would.

    A stream that finds no page goes on by recomputing, which is another measurement.
    """
    usage, flow = model.pipeline.flow.usage(), model.config.flow
    if not usage.capacity:
        return None
    own = PROMPT_TOKENS - flow.prefix_tokens(PROMPT_TOKENS) + spoken_tokens
    prompt_pages = flow.prefix_tokens(PROMPT_TOKENS) // flow.block_tokens
    needed = prompt_pages + streams * max(_RESERVED_PAGES, -(-own // flow.block_tokens))
    if needed <= usage.capacity:
        return None
    return f"needs {needed} pages of {usage.page_bytes / 1e6:.1f} MB, and the cache has {usage.capacity}"


def passes(
    model: Token2Wav, streams: int, hop: int, histories: list[float], repeats: int
) -> tuple[dict[float, list[Timed]], dict[float, str]]:
    """Results of several `one_pass` by history, after one to warm up; and why there are none, where memory ends."""
    histories, problems = list(histories), {}
    while histories:
        try:
            found = [dict(one_pass(model, streams, hop, histories)) for _ in range(repeats + 1)][1:]
        except torch.OutOfMemoryError as error:
            problems[histories.pop()] = f"out of memory: {' '.join(str(error).split())[:200]}"
        else:
            return {spoken_s: [each[spoken_s] for each in found] for spoken_s in histories}, problems
        torch.cuda.empty_cache()
    return {}, problems


def one_pass(model: Token2Wav, streams: int, hop: int, histories: list[float]) -> Iterator[tuple[float, Timed]]:
    """Streams from their first chunk on, and what a chunk took at each history."""
    with ChunkBatch(model, streams, prompt(PROMPT_TOKENS)) as batch:
        if histories[0] == 0.0:
            yield 0.0, (*batch.advance(hop), batch.new_tokens)
        for spoken_s in histories:
            target = round(25 * spoken_s)
            while batch.spoken_tokens < target:
                batch.advance(min(100, target - batch.spoken_tokens) if batch.spoken_tokens else 25)
            if spoken_s:
                yield spoken_s, (*batch.advance(hop), batch.new_tokens)


def floor_of(model: Token2Wav, row: dict[str, Any], rates: Rates) -> dict[str, Any]:
    """Floor of a row, and how many times that it took."""
    config, streams = model.config, row["streams"]
    ratio, vocoder = config.flow.token_mel_ratio, config.vocoder
    assert isinstance(vocoder, HiFTConfig)  # as all models of the report have
    frames = ratio * row["computed_tokens"]
    past = ratio * (round(25 * row["spoken_s"]) + PROMPT_TOKENS)
    if not row["spoken_s"]:
        past = ratio * config.flow.prefix_tokens(PROMPT_TOKENS)
    layout = CacheLayout.of(config.flow, model.engine.precision)
    floor = as_row(
        flow_work(config.flow, layout, model.engine.precision, streams, frames, past),
        vocoder_work(vocoder, streams, ratio * row["hop_tokens"]),
        rates,
    )
    return floor | {"ratio": round(row["total_ms"][0] / floor["floor_ms"], 2)}


def as_line(row: dict[str, Any]) -> str:
    return (
        f"{row['streams']:4} streams {row['spoken_s']:5g} s {row['hop_tokens']:4} tokens  "
        f"flow {row['flow_ms'][0]:8.2f} vocoder {row['vocoder_ms'][0]:7.2f} ms, "
        f"{row['ratio']:6.1f} times the floor of {row['floor_ms']:.2f} ms"
    )


def drift(folder: Path, settings: Settings) -> dict[str, Any]:
    """Times of chunks of 25 tokens of one stream under a window, from the third on; medians of several streams."""
    model = load(folder, settings, StreamConfig(left_blocks=settings.drift_window))
    times = defaultdict(list)
    for repeat in range(settings.repeats + 1):
        with ChunkBatch(model, 1, prompt(PROMPT_TOKENS)) as batch:
            for number in range(1, settings.drift_chunks + 1):
                seconds = sum(batch.advance(25))
                if repeat:
                    times[number].append(1000 * seconds)
    medians = [round(float(np.median(times[number])), 3) for number in range(1, settings.drift_chunks + 1)]
    first, last = medians[_FIRST_DRIFTING - 1], medians[-1]
    return {
        "left_blocks": settings.drift_window,
        "chunk_ms": medians,
        "third_ms": first,
        "last_ms": last,
        "chunks": settings.drift_chunks,
        "drift": round(last / first - 1, 4),
    }
