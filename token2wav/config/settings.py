"""Configuration of the service, typed and frozen: it sets chunks of streams, their runtime and
their bounds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from token2wav.config.strict_yaml import read_yaml
from token2wav.config.values import Bounds, Length, check_bounds, from_mapping
from token2wav.errors import ConfigError, LimitError

MOST_STEPS = 100  # of the ODE
MOST_STREAMS = 10_000  # open at once in one server
_PATIENCE = 3  # times the pace of speech
_VOICES_PER_STREAM = 4
PLAYER_BUFFER_SECONDS = 0.2  # of a player of which nothing is known
_LEAST_FIRST_TOKENS = 5

Steps = Annotated[int, Bounds(1, MOST_STEPS)]


@dataclass(frozen=True)
class StreamConfig:
    """Settings of streams: they say how tokens are cut into chunks, and what each chunk sees.

    Attributes:
        first_tokens: new tokens from which a stream speaks before an attention block is complete,
            at least 5; 0 waits for whole blocks. What is spoken of an incomplete block differs a
            little from the whole utterance's.
        max_hop_tokens: upper bound of a hop, in whole attention blocks; hops double from chunk to
            chunk, as far as the listener has audio to wait for tokens. 0 takes the model's own, for
            CosyVoice3 four blocks.
        left_blocks: attention blocks (of 25 tokens) of the past that stay visible beside the
            prompt's. -1 keeps all and is exact; 0 or more bounds memory and time, so that streams
            may have any length. Without it the model's own: all, or for Step-Audio2 the last two,
            as published.
        steps: numbers of ODE steps that a stream may ask for, the usual one first; empty for the
            model's own alone.
        hold_frames: mel frames at a chunk's end that yield no audio yet; 0 for all that the vocoder
            looks ahead, which is exact (21 for CosyVoice2, 5 for CosyVoice3). With fewer, chunks
            are earlier and their last samples are those of a mel whose last frame goes on.
        trim_silence_ms: leading near-silence that is dropped before the first chunk is sent, at
            most, in windows of 10 ms below -50 dBFS; 0 for none.
        reference: compute as the public loop does: every chunk anew from the start, the last one
            under the full attention mask, the harmonic source's phase with the public float32
            rounding, which drifts (0.4 rad after 300 s). Otherwise the audio is independent of
            chunking. Chatterbox: windows under full attention, or whole utterances
            (docs/models.md).
    """

    first_tokens: Annotated[int, Bounds(0, 1000)] = 8
    max_hop_tokens: Annotated[int, Bounds(0, 100_000)] = 0
    left_blocks: Annotated[int | None, Bounds(-1, 1_000_000)] = None
    steps: Annotated[tuple[Steps, ...], Length(MOST_STEPS)] = ()
    hold_frames: Annotated[int, Bounds(0, 1000)] = 0
    trim_silence_ms: Annotated[float, Bounds(0, 60_000)] = 0.0
    reference: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, "stream")
        if 0 < self.first_tokens < _LEAST_FIRST_TOKENS:
            raise ConfigError(
                f"stream.first_tokens: {self.first_tokens} is not 0, nor {_LEAST_FIRST_TOKENS} or "
                f"more"
            )
        for index, steps in enumerate(self.steps):
            if steps in self.steps[:index]:
                raise ConfigError(f"stream.steps[{index}]: {steps} is there twice")


@dataclass(frozen=True)
class RuntimeConfig:
    """Settings of the runtime: they choose device, engine, precision and memory.

    Attributes:
        device: `auto` (CUDA where torch sees a GPU, else CPU), `cpu`, `cuda` or `cuda:N`.
        engine: library that executes the networks: `torch`, `onnx` or `tensorrt`, the last two on
            graphs that `token2wav-export` made; `auto` takes the fastest for which all is there.
        engines: folder with those graphs; empty for `engines` in the model folder.
        precision: number type of the estimator's layers; `auto` is float16 on a GPU and float32 on
            a CPU.
        lanes: batches that a server computes at the same time, each on its share of torch's threads
            (OMP_NUM_THREADS); 0 takes one for each CPU core, up to 4, or a single one on a GPU.
        cache_mib: size of the cache of keys and values in MiB; 0 takes a quarter of the free memory
            of a CPU, or 80 % of a GPU's.
        cache_storage: type of cached keys and values; `auto` is that of `precision`. `float16`
            halves the cache (error of the mel 4e-5 of its deviation), `int8` quarters it (1e-3).
    """

    device: str = "auto"
    engine: Literal["auto", "torch", "onnx", "tensorrt"] = "auto"
    engines: str = ""
    precision: Literal["auto", "float32", "float16"] = "auto"
    # the scheduler's workers, under the name that users' settings have
    lanes: Annotated[int, Bounds(0, 256)] = 0
    # 16 TiB; the free memory is compared when it is taken
    cache_mib: Annotated[int, Bounds(0, 1 << 24)] = 0
    cache_storage: Literal["auto", "float32", "float16", "int8"] = "auto"

    def __post_init__(self) -> None:
        check_bounds(self, "runtime")
        kind, _, index = self.device.partition(":")
        if self.device not in ("auto", "cpu", "cuda") and not (
            kind == "cuda" and index.isdecimal()
        ):
            raise ConfigError(f"runtime.device: '{self.device}' is not auto, cpu, cuda or cuda:N")


@dataclass(frozen=True)
class LimitConfig:
    """Bounds that the server enforces before any work starts.

    Attributes:
        streams: most utterances open at once.
        stream_tokens: most tokens of one utterance (15000 are 10 minutes). One that is open for
            three times as long as these last is dropped.
        idle_seconds: time without tokens after which an utterance is dropped; requests without
            tokens don't count.
        streams_per_client: most utterances that one client may have open at once, where clients
            have names (docs/security.md); 0 for half of `streams`.
        batch_streams: chunks that are computed together. More raise the throughput, and the time
            that a batch takes.
        player_buffer_seconds: audio that a listener's player holds before it starts: how long a
            stream may wait for tokens counts from there.
    """

    streams: Annotated[int, Bounds(1, MOST_STREAMS)] = 64
    stream_tokens: Annotated[int, Bounds(1, 10_000_000)] = 15000
    idle_seconds: Annotated[float, Bounds(0.001, 86_400)] = 30.0
    streams_per_client: Annotated[int, Bounds(0, MOST_STREAMS)] = 0
    batch_streams: Annotated[int, Bounds(1, 1024)] = 8
    player_buffer_seconds: Annotated[float, Bounds(0.001, 60)] = PLAYER_BUFFER_SECONDS

    def __post_init__(self) -> None:
        check_bounds(self, "limits")

    @property
    def client_streams(self) -> int:
        """Utterances that one client may have open at once."""
        return self.streams_per_client or math.ceil(self.streams / 2)

    @property
    def sent_voices(self) -> int:
        """Most voices that are kept of those that clients send: the least recently used go first."""
        return _VOICES_PER_STREAM * self.streams

    def open_seconds(self, token_rate: float) -> float:
        """Returns the time after which an open utterance is dropped, whatever comes.

        Args:
            token_rate: tokens of a second of speech.
        """
        return _PATIENCE * self.stream_tokens / token_rate

    def check_room(self, owners: Collection[str], client: str) -> None:
        """Raises LimitError if one more utterance is too many.

        Args:
            owners: clients of the open utterances, each as often as it has one; empty where it has
                no name.
            client: name of the one that opens another; without a name it is bounded by `streams`
                alone.
        """
        if len(owners) >= self.streams:
            raise LimitError(f"streams: all {self.streams} are in use; try again later")
        if client and sum(owner == client for owner in owners) >= self.client_streams:
            raise LimitError(
                f"streams: client '{client}' has {self.client_streams} open, all that one may have "
                "(limits.streams_per_client); try again later"
            )


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of a server, as its file gives it; every key is optional.

    Attributes:
        voices: paths of voices that the server knows from the start, by the names of these files
            without their ending; `.safetensors`, or `.pt` of Chatterbox, in the file relative to
            its folder.
    """

    stream: StreamConfig = field(default_factory=StreamConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)
    voices: tuple[str, ...] = ()


def load_server_config(path: Path | None) -> ServerConfig:
    """Reads a server configuration; None gives the defaults.

    Raises:
        ConfigError: it cannot be read as YAML, see `read_yaml`, or has an unknown key, or a value
            of the wrong type or out of range.
    """
    if path is None:
        return ServerConfig()
    data = read_yaml(path)
    try:
        config = from_mapping(ServerConfig, {} if data is None else data, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return dataclasses.replace(
        config, voices=tuple(str(path.parent / file) for file in config.voices)
    )


def config_hash(*configs: Any) -> str:
    """Hashes configurations to twelve hexadecimal digits that identify them in logs and artefacts."""
    # What a configuration does not have is left out, so that a part that is new in a release
    # changes no hash of others.
    said = [
        dataclasses.asdict(
            config,
            dict_factory=lambda items: {key: value for key, value in items if value is not None},
        )
        for config in configs
    ]
    text = json.dumps(said, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
