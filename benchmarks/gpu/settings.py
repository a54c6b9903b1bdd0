"""What a report measures, and the same in small: its rehearsal, which needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from token2wav.artifacts import Precision
from token2wav.config import RuntimeConfig, StreamConfig

PROMPT_TOKENS = 75  # 3 s


@dataclass(frozen=True)
class Setup:
    """How streams are served while they are counted.

    Attributes:
        name: for tables.
        stream: how they are cut.
        cache_storage: see `RuntimeConfig`.
    """

    name: str
    stream: StreamConfig
    cache_storage: Literal["auto", "float32", "float16", "int8"] = "auto"


# Tokens at the pace of a language model cannot feed a hop that grows (docs/architecture.md, "Who runs next").
EXACT = Setup("all of the past", StreamConfig(hop="lead"))
WINDOW = Setup("window of 8 blocks, int8", StreamConfig(hop="lead", left_blocks=8), "int8")
LEAN = Setup(
    "window of 2 blocks, hops up to 50 tokens, int8",
    StreamConfig(hop="lead", left_blocks=2, max_hop_tokens=50),
    "int8",
)


@dataclass(frozen=True)
class Settings:
    """Everything that sections need to know.

    Attributes:
        out: folder of the results.
        device, engine, precision, cache_mib: see `RuntimeConfig`.
        size: of the model; its name in `benchmarks.engines.model_folder`.
        minutes: after which a section is ended.
        engines: that are compared; empty for all of the device.
        engine_batches: streams in the chunks that they are timed with.
        batches, spoken_s, hops: streams, seconds of their utterances before the chunk, and tokens of chunks to time.
        repeats: of every timing, after one to warm up.
        drift_chunks, drift_window: length of the windowed stream, and its `left_blocks`.
        parity_batches: streams that are compared with each of them alone.
        bucket_past, bucket_streams: how far batches reach that fill CUDA graphs; by default those of engines without
            kernels, which have a graph for every length of the past.
        peer_streams: in one batch, against as many one after the other.
        setups: under which real-time streams are counted; the last one is that of the server.
        stream_s: length of an utterance there.
        fewest_streams, most_streams: to start the search with, and to end it with.
        patience_s: after the last token, for audio that is late.
        copy_mib, matrix: sizes for bandwidth and for matrix products.
        clients: of the server's closed loop; its open loop starts with arrivals_per_s.
        serving_s: for which a load starts utterances there, of serving_utterance_s each.
    """

    out: Path
    device: str = "cuda"
    engine: Literal["auto", "torch", "onnx", "tensorrt"] = "torch"
    precision: Literal["auto", "float32", "float16"] = "auto"
    cache_mib: int = 0
    size: str = "full"
    minutes: float = 30.0
    engines: tuple[str, ...] = ()
    engine_batches: tuple[int, ...] = (1, 4, 16)
    batches: tuple[int, ...] = (1, 4, 16, 64, 128)
    spoken_s: tuple[float, ...] = (2.0, 10.0, 30.0)
    hops: tuple[int, ...] = (25, 50, 100)
    repeats: int = 5
    drift_chunks: int = 60
    drift_window: int = 8
    parity_batches: tuple[int, ...] = (1, 3, 16, 64)
    bucket_past: int = 64
    bucket_streams: int = 4
    peer_streams: int = 64
    setups: tuple[Setup, ...] = (EXACT, WINDOW, LEAN)
    stream_s: float = 20.0
    fewest_streams: int = 8
    most_streams: int = 1024
    patience_s: float = 30.0
    copy_mib: int = 1024
    matrix: int = 8192
    clients: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 320)
    arrivals_per_s: float = 0.5
    serving_s: float = 20.0
    serving_utterance_s: float = 20.0

    @property
    def exact_precision(self) -> Precision:
        """What `auto` comes to on the device."""
        if self.precision == "auto":
            return "float16" if self.device.startswith("cuda") else "float32"
        return self.precision

    def runtime(self, **changes: Any) -> RuntimeConfig:
        """What models of a section run on."""
        own = RuntimeConfig(device=self.device, engine=self.engine, precision=self.precision, cache_mib=self.cache_mib)
        return replace(own, **changes)


def rehearsal(out: Path) -> Settings:
    """The same sections on a CPU, with the tiny model and the least of everything: its figures mean nothing."""
    return Settings(
        out,
        device="cpu",
        cache_mib=256,
        size="tiny",
        engines=("torch",),
        engine_batches=(1,),
        batches=(1, 2),
        spoken_s=(2.0,),
        hops=(25, 50),
        repeats=1,
        drift_chunks=4,
        drift_window=1,
        parity_batches=(3,),
        bucket_past=4,
        bucket_streams=1,
        peer_streams=2,
        setups=(EXACT, LEAN),
        stream_s=2.0,
        fewest_streams=2,
        most_streams=2,
        copy_mib=16,
        matrix=128,
        clients=(1, 2),
        serving_s=2.0,
        serving_utterance_s=2.0,
    )
