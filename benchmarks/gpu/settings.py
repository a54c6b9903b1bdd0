"""Settings of the report's sections, such as sizes and repeats, and the slices of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from token2wav.config import RuntimeConfig, StreamConfig

Row = dict[str, Any]
# rows of a section: the key of each row, and the function that measures it
Rows = Iterator[tuple[str, Callable[[], Row]]]


class LeftOut(Exception):  # noqa: N818 (it is no error)
    """Reason why a row is not measured: a package is not installed, or memory is too small.

    Such a row is not a fault.
    """


PROMPT_TOKENS = 75  # 3 s
PACE = 25.0  # tokens per second of a language model
# Ways to serve streams: the configuration of chunks (always whole blocks), and the storage type of
# cached keys and values.
_LEAN = StreamConfig(first_tokens=0, left_blocks=2, max_hop_tokens=50)
SETTINGS: dict[str, tuple[StreamConfig, Literal["auto", "int8", "float8"]]] = {
    "lean": (_LEAN, "int8"),
    "lean8": (_LEAN, "float8"),
    "window": (StreamConfig(first_tokens=0, left_blocks=8), "int8"),
    "exact": (StreamConfig(first_tokens=0), "auto"),
}


@dataclass(frozen=True)
class Settings:
    """Settings of all sections; the option --set changes any field."""

    out: Path = Path()  # folder of the results
    device: str = "cuda"
    size: Literal["full", "tiny"] = "full"
    precision: Literal["float16", "float32"] = "float16"
    cache_mib: int = 0
    # of chunks: storage type of cached keys and values
    storage: Literal["auto", "int8", "float8"] = "auto"
    # of parity, streams, server
    setting: Literal["lean", "lean8", "window", "exact"] = "exact"
    batches: tuple[int, ...] = (1, 16, 64)  # batch sizes of the timed chunks
    histories: tuple[float, ...] = (2.0, 10.0, 30.0)  # seconds of audio before a timed chunk
    hops: tuple[int, ...] = (25, 100)  # new tokens of a timed chunk
    # Repeats of every timing, after one warm-up. An idle GPU lowers its clock, so that few repeats
    # show the clock and not the chunk.
    repeats: int = 30
    repeat_s: float = 6.0  # seconds after which a timing that has three repeats gets no more
    drift_chunks: int = 60
    drift_window: int = 8  # `left_blocks` of section drift
    # batch sizes that use every captured batch shape, some only partly filled
    parity_batches: tuple[int, ...] = (1, 2, 3, 5, 9, 17, 25, 33, 49, 64)
    streams_from: int = 128  # first number of real-time streams to try
    most_streams: int = 1024
    batch_streams: int = 64  # streams in one batch, see `LimitConfig`
    stream_s: float = 20.0  # length of an utterance in the sections streams and server
    patience_s: float = 5.0  # waiting time for late audio after the last token
    test_files: int = 0  # number of test files to run; 0 runs all
    clients: tuple[int, ...] = (1, 16, 64, 128, 256, 320)  # numbers of clients of the server
    # Codecs by their names in `testkit.models.published_codecs`, and their streams in a batch.
    codecs: tuple[str, ...] = ("mimi", "qwen3_tts", "nanocodec", "snac", "causal_dac", "higgs")
    codec_streams: tuple[int, ...] = (1, 32, 64)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def runtime(self, **changes: Any) -> RuntimeConfig:
        """Returns the runtime configuration of a section's models."""
        runtime = RuntimeConfig(
            self.device, "torch", precision=self.precision, cache_mib=self.cache_mib
        )
        return replace(runtime, **changes)

    def rehearsal(self) -> Settings:
        """Returns the smallest settings, with the tiny model, that run the same sections.

        The measured figures mean nothing.
        """
        small = replace(
            self, size="tiny", precision="float16" if self.on_gpu else "float32", cache_mib=128
        )
        small = replace(
            small,
            batches=(2,),
            histories=(2.0,),
            hops=(25,),
            repeats=1,
            drift_chunks=4,
            drift_window=1,
        )
        small = replace(
            small,
            parity_batches=(2,),
            streams_from=2,
            most_streams=2,
            stream_s=2.0,
            patience_s=30.0,
        )
        return replace(
            small,
            test_files=11,
            clients=(1,),
            codecs=("mimi",),
            codec_streams=(2,),
        )


PLANNED = Settings()
MINUTES = 4.5  # time limit of a slice, so that two slices fit a call of 10 minutes
LAST_S = 15.0  # time of a slice that is reserved for ending a section
REHEARSAL = "rehearsal of "
RESULTS = "results.json"
# Sections with their share of the remaining time and their changes to the settings. The most
# valuable sections come first. A slice takes about four minutes on an H200.
SLICES: dict[int, list[tuple[str, float, dict[str, Any]]]] = {
    1: [
        ("smoke", 0.25, {}),
        ("chunks", 0.4, {"batches": (1,)}),
        ("tests", 0.8, {}),
        (REHEARSAL, 0.3, {}),
    ],
    2: [
        # 64 streams after 30 s need more pages than a GPU has in float16.
        ("chunks", 0.35, {"batches": (64,), "storage": "int8", "hops": (100,), "repeat_s": 3.0}),
        ("parity", 0.4, {}),
        ("streams", 0.75, {"setting": "lean", "streams_from": 300}),
        ("recompute", 1.0, {"repeat_s": 3.0}),
    ],
    3: [
        ("parity", 0.35, {"setting": "lean"}),
        ("chunks", 0.5, {"batches": (16, 64), "repeat_s": 3.0}),
        ("drift", 0.4, {}),
        ("parity", 1.0, {"precision": "float32"}),
    ],
    4: [
        ("streams", 0.35, {"setting": "window", "streams_from": 64}),
        ("streams", 0.4, {"streams_from": 32}),
        ("parity", 0.35, {"setting": "lean8", "parity_batches": (1, 16, 64)}),
        ("streams", 0.45, {"setting": "lean8", "streams_from": 300}),
        ("codecs", 0.5, {}),
        ("server", 1.0, {"setting": "lean"}),
    ],
}
