"""Section codecs: time of a packet of codec decoders, as streams of a server get it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu.settings import Row, Rows, Settings
from testkit.models.codec_models import drawn_tokens
from testkit.models.published_codecs import SIXTEENTH, write_codec
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.published.registry import read_config
from token2wav.voice import voice_for

_PACKETS_BEFORE = 10  # not timed: the first ones are shorter, and an idle GPU lowers its clock


def codecs(folder: Path, settings: Settings, done: Mapping[str, Row]) -> Rows:
    """Measures packets of a frame, or of the fewest frames that a codec decodes at a time."""
    for name in settings.codecs:
        with tempfile.TemporaryDirectory() as temporary:
            sizes = SIXTEENTH[name] if settings.size == "tiny" else None
            path = write_codec(name, Path(temporary), sizes)
            began = time.monotonic()
            stream = StreamConfig(max_hop_tokens=read_config(path).block_tokens, lookahead_frames=0)
            runtime = RuntimeConfig(settings.device, "torch")
            model = Token2Wav.load(path, stream=stream, runtime=runtime)
        graphs = model.summary.graphs
        loaded = {"load_s": round(time.monotonic() - began, 1), "graphs": graphs.graphs}
        yield f"{name}: the model", lambda loaded=loaded: loaded  # type: ignore[misc]
        for streams in settings.codec_streams:
            yield f"{name}: {streams} streams", partial(packets, model, settings, streams)


def packets(model: Token2Wav, settings: Settings, streams: int) -> Row:
    """Times packets of all streams: median, least and most, in ms.

    The time begins with codes in the memory of the host, and ends with audio there.
    """
    pipeline, config = model.pipeline, model.config
    block, count = config.block_tokens, _PACKETS_BEFORE + settings.repeats
    codes = drawn_tokens(config, block * count)
    requests = [pipeline.utterance(voice_for(config, None)) for _ in range(streams)]
    times, samples = [], 0
    for request in requests:
        pipeline.open(request)
    try:
        for index in range(count):
            for request in requests:
                request.chunker.push(codes[block * index : block * (index + 1)], end=False)
            if requests[0].chunker.next_chunk is None:  # waits for more frames
                continue
            began = time.perf_counter()
            chunks = pipeline.advance(requests)
            times.append(1000 * (time.perf_counter() - began))
            for request, chunk in zip(requests, chunks, strict=True):
                request.chunker.finish_chunk()
                if isinstance(chunk, Exception):
                    raise chunk
            samples = 0 if chunks[0] is None else len(chunks[0].audio)  # type: ignore[union-attr]
    finally:
        for request in requests:
            pipeline.close(request)
    timed = np.array(times[-settings.repeats :])
    packet_s = samples / config.sample_rate
    return {
        "packet_s": round(packet_s, 4),
        "ms": [round(float(value), 3) for value in (np.median(timed), timed.min(), timed.max())],
        "times real time": round(streams * packet_s * 1000 / float(np.median(timed)), 1),
    }
