"""Section codecs: time of a packet of codec decoders, as streams of a server get it."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.chunk_batch import next_audio, requests_in, spread_ms
from benchmarks.gpu.chunks import profiled
from benchmarks.gpu.settings import Row, Rows, Settings
from testkit.models.codec_models import CODECS, drawn_tokens
from testkit.models.published_codecs import SIXTEENTH, SIZES
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.config.settings import DecoderPrecision
from token2wav.layers import convolutions
from token2wav.published.registry import read_config
from token2wav.voice import voice_for

_PACKETS_BEFORE = 10  # not timed: the first ones are shorter, and an idle GPU lowers its clock
PROFILED = ("qwen3_tts", "nanocodec")  # slower on an H200 than their number of operations explains
ROUNDED: tuple[DecoderPrecision, ...] = ("float16x3", "float16")


def codecs(folder: Path, settings: Settings) -> Rows:
    """Measures packets of a frame, or of the fewest frames that a codec decodes at a time.

    The codecs in `PROFILED` are also measured with rounded operands, and with the convolutions of
    cuDNN in place of products.
    """
    cases: list[tuple[str, DecoderPrecision, bool]]
    cases = [(codec, "float32", True) for codec in settings.codecs]
    for codec in [name for name in settings.codecs if name in PROFILED and settings.on_gpu]:
        cases += [(codec, precision, True) for precision in ROUNDED]
        cases += [(codec, "float32", False)]
    for codec, precision, products in cases:
        name = codec if precision == "float32" else f"{codec} in {precision}"
        name += "" if products else " by cuDNN"
        convolutions.products_on_gpu = products
        with tempfile.TemporaryDirectory() as temporary:
            sizes = (SIXTEENTH if settings.size == "tiny" else SIZES)[codec]
            path = CODECS[codec].write(Path(temporary), sizes)
            began = time.monotonic()
            stream = StreamConfig(max_hop_tokens=read_config(path).block_tokens, lookahead_frames=0)
            runtime = RuntimeConfig(settings.device, "torch", decoder_precision=precision)
            model = Token2Wav.load(path, stream=stream, runtime=runtime)
        graphs = model.summary.graphs
        loaded = {"load_s": round(time.monotonic() - began, 1), "graphs": graphs.graphs}
        yield f"{name}: the model", lambda loaded=loaded: loaded  # type: ignore[misc]
        for streams in settings.codec_streams:
            yield f"{name}: {streams} streams", partial(packets, model, settings, streams)
        if codec in PROFILED:
            yield f"profile of {name}", partial(packets, model, settings, 1, profile=name)


def packets(model: Token2Wav, settings: Settings, streams: int, profile: str = "") -> Row:
    """Times packets of all streams: median, least and most, in ms. With a name in `profile`,
    profiles one packet instead.

    The time begins with codes in the memory of the host, and ends with audio there.
    """
    config, block = model.config, model.config.block_tokens
    count, times, samples = _PACKETS_BEFORE + settings.repeats, list[float](), 0
    codes = drawn_tokens(config, block * count)
    with requests_in(model, voice_for(config, None), streams) as requests:
        for index in range(count):
            for request in requests:
                request.chunker.push(codes[block * index : block * (index + 1)], end=False)
            if requests[0].chunker.next_chunk is None:  # waits for more frames
                continue
            if profile and index >= _PACKETS_BEFORE:
                return profiled(partial(next_audio, model, requests), settings, profile)
            began = time.perf_counter()
            chunk = next_audio(model, requests)
            times.append(time.perf_counter() - began)
            samples = 0 if chunk is None else len(chunk.audio)
    ms, packet_s = spread_ms(times[-settings.repeats :]), samples / config.sample_rate
    return {
        "packet_s": round(packet_s, 4),
        "ms": ms,
        "times real time": round(streams * packet_s * 1000 / ms[0], 1),
    }
