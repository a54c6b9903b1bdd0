"""Settings of the service, as typed and frozen dataclasses: streams, runtime, limits and voices."""

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

MOST_STEPS = 100  # largest number of ODE steps
MOST_REPEATS = 1_000_000  # largest limit on equal tokens in a row
MOST_SILENCE_S = 3600.0  # largest limit on silence in seconds
MOST_STREAMS = 10_000  # largest number of open streams in one server
_PATIENCE = 3  # a stream may be open this many times as long as its longest audio lasts
_VOICES_PER_STREAM = 4
PLAYER_BUFFER_SECONDS = 0.2  # default: audio that a player collects before it starts
_LEAST_FIRST_TOKENS = 5


Steps = Annotated[int, Bounds(1, MOST_STEPS)]
DecoderPrecision = Literal["float32", "float16x3", "float16"]


@dataclass(frozen=True)
class StreamConfig:
    """Settings of streams: the lengths of chunks, the visible past, ODE steps and silence.

    Attributes:
        first_tokens: number of new tokens, look-ahead not counted, after which a stream sends its
            first audio, before its attention block is complete; at least 5. The number rises if the
            last stage holds back more than half of the audio of these tokens. 0 waits for whole
            blocks. Audio of an incomplete block differs a little from the audio of the whole
            utterance.
        provisional_lookahead_tokens: number of tokens that must follow a provisional chunk, which
            is a chunk of an incomplete block. The look-ahead of the model, which all other chunks
            need, is the upper limit. With fewer tokens the audio comes earlier, and its last frames
            differ more from the audio of the whole utterance.
        provisional_steps: number of ODE steps of a provisional chunk, at most the number of the
            stream. Fewer steps cost less. 0 takes three tenths of the steps of the stream, but at
            least 3, and all steps of a model with a fixed list of times.
        max_hop_tokens: largest hop, a multiple of the attention block. A hop is the usual number of
            new tokens in a chunk. Hops double from chunk to chunk, as long as the listener has
            enough audio to wait for the tokens. 0 takes the value of the model, four blocks for
            CosyVoice3.
        left_blocks: past attention blocks (25 tokens each; 2 tokens in Audex) that a chunk sees,
            besides the prompt. -1 keeps all blocks, and is exact. 0 or more bounds memory and time,
            so that streams may have any length. None takes the value of the model: all blocks, or
            for Step-Audio2 the last two, as published, or the context of a decoder in windows. The
            past of all other codecs is fixed, and they refuse any value but None.
        block_tokens: tokens of an attention block, for models that were trained on blocks of
            several lengths: `use_dynamic_chunk` in the file of a CosyVoice2 model, or weights for
            this block in a MOSS-Speech folder. 0 takes the value of the model. Any other value
            runs on torch only. For a decoder that is not causal, tokens of a window; `left_blocks`
            and `lookahead_frames` are then its context on both sides, and `lookahead_frames: 0`
            decodes the whole utterance at once (docs/exactness.md).
        overlap_tokens: tokens over which the audio of a window fades into that of the next one, for
            a decoder that is not causal; None takes the value of the model.
        steps: numbers of ODE steps that a stream may request, the default first. Empty allows only
            the number of the model.
        lookahead_frames: mel frames, or tokens of a codec, that must follow audio before it is
            sent, so the audio of the last ones of a chunk is withheld until the next chunk. 0 takes
            the whole look-ahead of the vocoder (21 frames for CosyVoice2, 5 for CosyVoice3), and is
            exact. With fewer frames audio is sent earlier, but the last samples of each chunk are
            computed as if the last frame were repeated. A codec uses later tokens instead, as far
            as they have arrived. None takes the value of the model: 0, or fewer frames than the
            look-ahead for a codec with a long one, or the context of a decoder in windows.
        decoder_noise: whether the decoder adds the noise that belongs to its model (SNAC). A
            request may choose otherwise. Models without such noise ignore this setting.
        trim_silence_ms: most milliseconds of leading silence that are removed before the first
            chunk is sent, in windows of 10 ms below -50 dBFS; 0 for none.
        end_after_repeats: number of equal tokens in a row after which the server ends a stream, 2
            or more; 0 for no limit. For tokens of several codes, all codes must be equal.
        end_after_silence_s: seconds of audio below -50 dBFS after which the server ends a stream;
            0 for no limit.
        mark: name of an installed plugin that marks all audio as synthetic (docs/security.md); None
            for no mark.
        reference: whether to compute as the published streaming loop does (docs/parity.md), which
            recomputes every chunk from the start of the utterance. If False, the audio does not
            depend on chunking.
    """

    first_tokens: Annotated[int, Bounds(0, 1000)] = 6
    provisional_lookahead_tokens: Annotated[int, Bounds(1, 1000)] = 2
    provisional_steps: Annotated[int, Bounds(0, MOST_STEPS)] = 0
    max_hop_tokens: Annotated[int, Bounds(0, 100_000)] = 0
    left_blocks: Annotated[int | None, Bounds(-1, 1_000_000)] = None
    block_tokens: Annotated[int, Bounds(0, 1000)] = 0
    overlap_tokens: Annotated[int | None, Bounds(0, 1000)] = None
    steps: Annotated[tuple[Steps, ...], Length(MOST_STEPS)] = ()
    lookahead_frames: Annotated[int | None, Bounds(0, 1000)] = None
    decoder_noise: bool = True
    trim_silence_ms: Annotated[float, Bounds(0, 60_000)] = 0.0
    end_after_repeats: Annotated[int, Bounds(0, MOST_REPEATS)] = 0
    end_after_silence_s: Annotated[float, Bounds(0, MOST_SILENCE_S)] = 0.0
    mark: str | None = None
    reference: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, "stream")
        if 0 < self.first_tokens < _LEAST_FIRST_TOKENS:
            raise ConfigError(
                f"stream.first_tokens: {self.first_tokens} is not allowed; must be 0, or "
                f"{_LEAST_FIRST_TOKENS} or more"
            )
        if self.end_after_repeats == 1:
            raise ConfigError("stream.end_after_repeats: 1 is not allowed; must be 0, or 2 or more")
        for index, steps in enumerate(self.steps):
            if steps in self.steps[:index]:
                raise ConfigError(f"stream.steps[{index}]: {steps} appears more than once")


@dataclass(frozen=True)
class RuntimeConfig:
    """Settings of the runtime: device, backend, precision, workers and cache.

    Attributes:
        device: `auto` (CUDA if torch sees a GPU, else CPU), `cpu`, `cuda` or `cuda:N`.
        backend: library that executes the networks: `torch`, `onnx` or `tensorrt`. The last two
            need graphs that `token2wav export` made. `auto` takes torch. On a CPU it was
            measured to be the fastest. On a GPU it computes the largest batches. `pause` computes
            nothing, for measurements of the server without a GPU: each batch takes a set time, and
            the audio is a test signal.
        engines: folder of the exported graphs; empty for `engines` in the model folder.
        precision: dtype of the estimator's layers; `auto` is float16 on a GPU and float32 on a CPU.
        decoder_precision: rounding of the operands of a codec decoder's convolutions. Their sums
            are always float32 (docs/parity.md). `float16x3` makes a product of three of float16.
            `float16` halves the operands. Both need torch 2.8 on a GPU, and gain nothing on a CPU.
            Convolutions of a flow and its vocoder on kernels follow `precision`: with float16 they
            round to TF32 (BigVGAN: `float16x3`), or to float16 if this setting is `float16` too,
            and ignore other values.
        workers: number of batches that are computed at the same time. Each one has an equal share
            of torch's threads (OMP_NUM_THREADS). 0 takes one for each CPU core, up to 4, or one on
            a GPU.
        cache_mib: size of the key-value cache in MiB; 0 takes a quarter of the free memory of a
            CPU, or 80 % of the free memory of a GPU.
        cache_storage: dtype of the cached keys and values; `auto` is the dtype of `precision`.
            Relative to float32, `float16` halves the cache (error of the mel: 4e-5 of its standard
            deviation), `int8` quarters it (1e-3), and `float8` is 6 % smaller than `int8` (7e-3). A
            GPU needs compute capability 8.9 or more for `float8`.
        pause_batch_ms, pause_token_ms: milliseconds that a batch of the backend `pause` takes, and
            further ones for each token of its chunks. Other backends ignore them.
    """

    device: str = "auto"
    backend: Literal["auto", "torch", "onnx", "tensorrt", "pause"] = "auto"
    engines: str = ""
    precision: Literal["auto", "float32", "float16"] = "auto"
    workers: Annotated[int, Bounds(0, 256)] = 0
    # Up to 16 TiB. The free memory is checked when the cache is allocated.
    cache_mib: Annotated[int, Bounds(0, 1 << 24)] = 0
    cache_storage: Literal["auto", "float32", "float16", "int8", "float8"] = "auto"
    pause_batch_ms: Annotated[float, Bounds(0, 60_000)] = 5.0
    pause_token_ms: Annotated[float, Bounds(0, 1000)] = 0.08
    decoder_precision: DecoderPrecision = "float32"

    def __post_init__(self) -> None:
        check_bounds(self, "runtime")
        kind, _, index = self.device.partition(":")
        if self.device not in ("auto", "cpu", "cuda") and not (
            kind == "cuda" and index.isdecimal()
        ):
            raise ConfigError(f"runtime.device: '{self.device}' is not auto, cpu, cuda or cuda:N")


@dataclass(frozen=True)
class LimitConfig:
    """Limits that the server enforces before any work starts.

    Attributes:
        streams: most streams that may be open at the same time.
        stream_tokens: most tokens of one stream (15000 tokens are 10 minutes). A stream that is
            open for three times the duration of this audio is closed.
        idle_seconds: seconds without tokens after which a stream is closed. Messages without tokens
            do not count.
        streams_per_client: most streams that one client may have open at the same time, if clients
            have names (docs/security.md); 0 for half of `streams`.
        batch_streams: most chunks in a batch. A larger number raises the throughput, and the time
            of a batch.
        player_buffer_seconds: seconds of audio that a listener's player collects before it starts.
            The playback clock adds them to the time that a stream may wait for tokens.
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
        return self.streams_per_client or math.ceil(self.streams / 2)

    @property
    def sent_voices(self) -> int:
        """Most voices of clients that the server stores. The least recently used is evicted."""
        return _VOICES_PER_STREAM * self.streams

    def open_seconds(self, token_rate: float) -> float:
        """Returns the seconds after which an open stream is closed, even if tokens still arrive."""
        return _PATIENCE * self.stream_tokens / token_rate

    def check_room(self, owners: Collection[str], client: str) -> None:
        """Raises LimitError if no further stream may be opened.

        Args:
            owners: client name of each open stream; empty for a client without a name.
            client: client that opens a further stream. Without a name, only `streams` limits it.
        """
        if len(owners) >= self.streams:
            raise LimitError(f"streams: all {self.streams} are in use; try again later")
        if client and sum(owner == client for owner in owners) >= self.client_streams:
            raise LimitError(
                f"streams: client '{client}' has {self.client_streams} open, the "
                "most that one client may have (limits.streams_per_client); try again later"
            )


@dataclass(frozen=True)
class FrontConfig:
    """Settings of the program that `token2wav serve` starts.

    Attributes:
        front: program inside tritonserver that passes requests to the process with the model:
            `native` (C++, takes in more requests a second), `python` (needs no compiled library),
            or `auto` for the native one if its library is installed.
    """

    front: Literal["auto", "native", "python"] = "auto"


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of a server, with the keys of its file. Every key is optional.

    Attributes:
        voices: paths of voice files that the server loads at its start: `.safetensors`, or `.pt` of
            Chatterbox. The name of a voice is the name of its file without the suffix. In the
            configuration file, paths are relative to the folder of that file.
    """

    stream: StreamConfig = field(default_factory=StreamConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)
    server: FrontConfig = field(default_factory=FrontConfig)
    voices: tuple[str, ...] = ()


def load_server_config(path: Path | None) -> ServerConfig:
    """Reads a server configuration; None returns the defaults.

    Raises:
        ConfigError: as `read_yaml`; or a key is unknown, or a value has a wrong type or is out of
            bounds.
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
    """Returns a hash of configurations, 12 hexadecimal digits, to identify them in logs and
    artefacts.
    """
    # Fields that are None are left out. So a new optional field in a later release does not change
    # the hashes of configurations without it.
    values = [
        dataclasses.asdict(
            config,
            dict_factory=lambda items: {key: value for key, value in items if value is not None},
        )
        for config in configs
    ]
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
