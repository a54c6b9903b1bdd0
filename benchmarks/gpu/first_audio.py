"""Section first_audio: time to the first audio of streams with default settings, time of a first
chunk of one whole block, and the error of a stream.

With default settings, the first audio comes from a provisional chunk, which has few tokens and few
ODE steps. Sections flows and server measure it too. The other sections of the slices send whole
blocks only.
"""

from __future__ import annotations

import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.chunk_batch import chunk, chunk_key, next_audio, push_first, requests_in, spread_ms
from benchmarks.gpu.chunks import load
from benchmarks.gpu.parity import MEL, check, reference
from benchmarks.gpu.settings import SETTINGS, LeftOut, Row, Rows, Settings
from testkit.models.sized import a_voice
from token2wav import Token2Wav

# Suffixes of the keys of rows, by `Settings.products`.
_SUFFIXES = {"default": "", "kernels": ", products on kernels", "dependent": ", dependent launches"}


def first_audio(folder: Path, settings: Settings) -> Rows:
    """Measures loading, the first audio of batches, the first chunk of a whole block, and the error
    of one stream.
    """
    _choose_products(settings)
    suffix = _SUFFIXES[settings.products]
    model, loaded = load(folder, settings, SETTINGS["default"][0])
    hop = settings.hops[0]
    yield f"the model{suffix}", lambda: loaded
    for streams in settings.batches:
        yield first_audio_key(streams) + suffix, partial(first_packet, model, settings, streams)
    yield (
        chunk_key(1, hop, 0.0) + suffix,
        partial(chunk, model, settings.repeats, 1, hop, 0.0, settings.repeat_s),
    )
    yield (
        f"one stream against float32 without graphs{suffix}",
        partial(_agreement, model, folder, settings),
    )


def _choose_products(settings: Settings) -> None:
    """Applies `Settings.products` to the kernels of this process."""
    if settings.products == "default":
        return
    if settings.products == "dependent":
        if not settings.on_gpu or torch.cuda.get_device_capability(settings.device) < (9, 0):
            raise LeftOut("dependent launches need a GPU of compute capability 9.0")
        import_module("token2wav.kernels.dependent_launch").enable()
    products: Any = import_module("token2wav.kernels.products")
    products.cublas_rows = {}


def first_audio_key(streams: int) -> str:
    return f"{streams} streams, first audio"


def first_packet(model: Token2Wav, settings: Settings, streams: int) -> Row:
    """Times the first audio of a batch of new streams: median, least and most, in ms.

    The time runs from tokens in the memory of the host to audio in this memory. The voice is
    cached. Each stream has as many tokens as its first chunk needs.
    """
    times, tokens, chunk_tokens, samples = [], 0, 0, 0
    for _ in range(settings.repeats + 1):  # the first repeat computes the prompt and warms up
        with requests_in(model, a_voice(model.config), streams) as requests:
            tokens = push_first(model, requests)
            chunk_tokens = requests[0].chunker.next_tokens
            began = time.perf_counter()
            audio = next_audio(model, requests)
            times.append(time.perf_counter() - began)
            samples = 0 if audio is None else len(audio.audio)
    return {
        "streams": streams,
        "needed_tokens": tokens,
        "next_tokens": chunk_tokens,
        "audio_ms": round(1000 * samples / model.config.sample_rate, 1),
        "ms": spread_ms(times[1:]),
    }


def _agreement(model: Token2Wav, folder: Path, settings: Settings) -> Row:
    return check(model, 1, reference(folder, settings, 1), MEL[model.summary.precision])
