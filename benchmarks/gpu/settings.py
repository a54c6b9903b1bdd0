"""Settings of the report's sections, such as sizes and repeats, and the slices of the report."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from token2wav.config import RuntimeConfig, StreamConfig
from token2wav.config.settings import DecoderPrecision

Row = dict[str, Any]
# Rows of a section: the section yields the key of each row, and the function that measures it. In
# return it receives the row, which another process may have measured.
Rows = Generator[tuple[str, Callable[[], Row]], Row, None]


class LeftOut(Exception):  # noqa: N818 (it is no error)
    """Reason why a row is not measured, for example a missing package or too little memory.

    The report lists such a row as left out, not as a fault.
    """


PROMPT_TOKENS = 75  # 3 s
PACE = 25.0  # tokens per second of a language model
# Names of two systems of section baselines: the public loop, which computes the whole history again
# for every chunk, and this project.
LOOP, OURS = "public loop", "token2wav"
# Ways to serve streams: the configuration of chunks, and the storage type of cached keys and
# values. Only `default` sends provisional chunks; the others send whole blocks.
_LEAN = StreamConfig(first_tokens=0, left_blocks=2, max_hop_tokens=50)
SETTINGS: dict[str, tuple[StreamConfig, Literal["auto", "int8", "float8"]]] = {
    "lean": (_LEAN, "int8"),
    "lean8": (_LEAN, "float8"),
    "window": (StreamConfig(first_tokens=0, left_blocks=8), "int8"),
    "exact": (StreamConfig(first_tokens=0), "auto"),
    "default": (StreamConfig(), "auto"),
}


@dataclass(frozen=True)
class Settings:
    """Settings of all sections; the option --set changes any field."""

    out: Path = Path()  # folder of the results
    device: str = "cuda"
    size: Literal["full", "small", "tiny"] = "full"
    precision: Literal["float16", "float32"] = "float16"
    cache_mib: int = 0
    # Section chunks: storage type of cached keys and values.
    storage: Literal["auto", "int8", "float8"] = "auto"
    # All sections but codecs: `float16` gives float16 inputs to convolutions of flow and vocoder.
    decoder_precision: DecoderPrecision = "float32"
    # Section first_audio: how layers compute the two products that kernels/products.py fuses. As
    # users get it (`default`); without cuBLAS (`kernels`); or without cuBLAS, and with dependent
    # launches (`dependent`).
    products: Literal["default", "kernels", "dependent"] = "default"
    # Sections parity, streams and server: a way to serve streams.
    setting: Literal["lean", "lean8", "window", "exact", "default"] = "exact"
    batches: tuple[int, ...] = (1, 16, 64)  # streams in the batches of timed chunks
    histories: tuple[float, ...] = (2.0, 10.0, 30.0)  # seconds of audio before a timed chunk
    hops: tuple[int, ...] = (25, 100)  # new tokens of a timed chunk
    # Repeats of every timing, after one warm-up. An idle GPU lowers its clock, so few repeats would
    # measure the rise of the clock.
    repeats: int = 30
    repeat_s: float = 6.0  # seconds after which a timing ends, if it has three repeats
    late_streams: int = 64  # streams that run when the late stream of section late_first begins
    drift_chunks: int = 60
    drift_window: int = 8  # `left_blocks` of section drift
    parity_batches: tuple[int, ...] = (1, 33, 64)
    streams_from: int = 128  # first number of real-time streams to try
    most_streams: int = 1024
    batch_streams: int = 64  # streams in one batch, see `LimitConfig`
    stream_s: float = 20.0  # length of an utterance in the sections streams and server
    patience_s: float = 5.0  # seconds to wait for late audio after the last token
    test_files: int = 0  # number of test files to run; 0 runs all
    clients: tuple[int, ...] = (1, 16, 64, 128, 256, 320)  # numbers of clients of the server
    # Codecs by their names in `testkit.models.codec_models`, and their numbers of streams.
    codecs: tuple[str, ...] = ("mimi", "qwen3_tts", "nanocodec", "snac", "causal_dac", "higgs")
    codec_streams: tuple[int, ...] = (1, 32, 64)
    # Flows by their names in `testkit.models.sized.public_configs`.
    flows: tuple[str, ...] = (
        "CosyVoice2",
        "Chatterbox Turbo",
        "Step-Audio2",
        "Qwen2.5-Omni",
        "StreamFlow",
        "MOSS-Speech",
    )
    flow_streams: tuple[int, ...] = (1, 16)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def runtime(self, **changes: Any) -> RuntimeConfig:
        """Returns the runtime configuration of a section's models."""
        runtime = RuntimeConfig(
            self.device,
            "torch",
            precision=self.precision,
            cache_mib=self.cache_mib,
            decoder_precision=self.decoder_precision,
        )
        return replace(runtime, **changes)

    def rehearsal(self) -> Settings:
        """Returns the smallest settings that run the same sections, with the tiny model.

        Times of a rehearsal mean nothing.
        """
        return replace(
            self,
            size="tiny",
            precision="float16" if self.on_gpu else "float32",
            cache_mib=128,
            batches=(2,),
            histories=(2.0,),
            hops=(25,),
            repeats=1,
            late_streams=8,
            drift_chunks=4,
            drift_window=1,
            parity_batches=(2,),
            streams_from=2,
            most_streams=2,
            stream_s=2.0,
            patience_s=30.0,
            test_files=11,
            clients=(1,),
            codecs=("mimi",),
            codec_streams=(2,),
            flows=("CosyVoice3",),
            flow_streams=(2,),
        )


PLANNED = Settings()
MINUTES = 9.0  # time limit of a slice, for machines that are lent for calls of 10 minutes
REHEARSAL_MINUTES = 60.0  # the machine of a rehearsal may be busy
LAST_S = 15.0  # seconds of a slice that are reserved for the end of its last section
RESULTS = "results.json"
# Module of each section. The function in it has the name of the section. A module is imported only
# when its section runs, because it may need a package that is missing.
SECTIONS = {
    "first_audio": "benchmarks.gpu.first_audio",
    "late_first": "benchmarks.gpu.late_first",
    "chunks": "benchmarks.gpu.chunks",
    "codecs": "benchmarks.gpu.codecs",
    "flows": "benchmarks.gpu.flows",
    "server": "benchmarks.gpu.server",
    "products": "lab.tiles.measure",
    "baselines": "lab.peers.flow_baselines",
    "qwen3_tts": "lab.peers.qwen3_decoders",
    "parity": "benchmarks.gpu.parity",
    "drift": "benchmarks.gpu.chunks",
    "tests": "benchmarks.gpu.pytest_rows",
    "streams": "benchmarks.gpu.streams",
    "engines": "benchmarks.gpu.engines",
}
# Sections of each slice, with their time limits in seconds and their changes to the settings. The
# most valuable sections come first, because a machine may be lent for less than the time of all
# slices.
SLICES: dict[int, list[tuple[str, float, dict[str, Any]]]] = {
    1: [
        ("first_audio", 60, {"batches": (1, 16, 64)}),
        ("late_first", 40, {"repeats": 15}),
        # 64 streams after 30 s need more pages than a GPU has in float16.
        ("chunks", 80, {"batches": (64,), "storage": "int8", "hops": (25,), "repeat_s": 3.0}),
        ("codecs", 130, {}),
        ("server", 130, {"setting": "lean", "clients": (300, 400, 500)}),
        ("server", 85, {"setting": "default", "clients": (100, 200)}),
    ],
    2: [
        ("products", 40, {}),
        ("first_audio", 40, {"batches": (1,), "products": "kernels"}),
        ("first_audio", 40, {"batches": (1,), "products": "dependent"}),
        (
            "baselines",
            190,
            {"batches": (1, 8, 32, 64), "histories": (2.0, 10.0), "hops": (25,), "repeat_s": 2.0},
        ),
        ("qwen3_tts", 110, {"batches": (1, 32, 64)}),
        ("parity", 50, {"setting": "lean"}),
        ("parity", 50, {}),
    ],
    3: [
        ("flows", 130, {"repeats": 10}),
        ("streams", 80, {"setting": "lean", "streams_from": 300}),
        ("chunks", 60, {"batches": (1,), "repeat_s": 2.0}),
        (
            "chunks",
            40,
            {"batches": (64,), "histories": (2.0,), "hops": (25,), "storage": "int8"}
            | {"decoder_precision": "float16", "repeat_s": 3.0},
        ),
        ("chunks", 80, {"batches": (16, 64), "repeat_s": 2.0}),
        ("drift", 40, {}),
        ("tests", 90, {}),
    ],
}
