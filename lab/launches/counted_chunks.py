"""Chunks of models at their published sizes, counted launch by launch on torch's device `meta`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lab.launches.counted_stages import counted_stages
from lab.launches.launch import Launch, expected_us, least_us
from lab.launches.launch_counter import ENCODER, OUTSIDE, Counted, LaunchCounter
from testkit.models.sized import a_voice
from token2wav import StreamConfig
from token2wav.config.model_config import ModelConfig
from token2wav.stages.stage import FrameChunk, TokenChunk

PROMPT_TOKENS = 75
STREAMS, SPOKEN_S = (1, 64), (0.0, 10.0)
SUM = "sum"
# Expected time of the host for a batch: of one stream, and of each further stream, in microseconds.
# Measured on 2026-11-29 with empty graphs on an idle core of 2.6 GHz (AMD EPYC, Zen 5), as medians
# of later chunks of 1 and 64 streams, without the time in which a CPU copies mel and audio. Mimi,
# Qwen3-TTS, NanoCodec and MOSS took 62 and 9.6 us, the flow of CosyVoice2 and 3 took 175 and 43 us,
# and their vocoder 107 and 17 us. One stream of a flow keeps an earlier, higher figure: without it,
# its chunks are expected to take 17 % less than an H200 took, in place of 14 %.
HOST_US = {"flow": (450, 40), "vocoder": (250, 20), "decoder": (62, 10)}
_UNCACHED_HOPS = 4  # hops after which every chunk of a stage without a cache costs the same


@dataclass
class Work:
    """Work of one stage for one batch of chunks.

    Attributes:
        launches: kernel launches.
        captured: launches that are nodes of CUDA graphs.
        from_host: copies from the memory of the host.
        bytes: bytes that the launches read and write.
        operations: floating-point operations, by kind.
        least_ms: sum of the least times of the launches, in ms.
        expected_ms: sum of the expected times of the launches, in ms. For `outside` it is the time
            of the host.
    """

    launches: int = 0
    captured: int = 0
    from_host: int = 0
    bytes: float = 0.0
    operations: dict[str, float] = field(default_factory=dict)
    least_ms: float = 0.0
    expected_ms: float = 0.0

    def add(self, counted: Counted) -> None:
        launch = counted.launch
        self.launches += 1
        self.captured += counted.captured
        self.from_host += launch.from_host
        self.bytes += launch.bytes
        if launch.operations:
            known = self.operations.get(launch.kind, 0.0)
            self.operations[launch.kind] = known + launch.operations
        self.least_ms += least_us(launch, captured=counted.captured) / 1000
        self.expected_ms += expected_us(launch, captured=counted.captured) / 1000


@dataclass(frozen=True)
class ChunkWork:
    """Work of a batch with one chunk of each stream.

    Attributes:
        hop_tokens: new tokens of each chunk. A first chunk also computes the end of the prompt.
        spoken_s: seconds of speech before the chunk; 0 for a first chunk.
        stages: work by stage: `encoder` of a flow, `outside` (host code around the graphs), the
            stages of the model, and `sum`.
        step_launches: launches of one ODE step; 0 without an ODE.
        layer_launches: launches of one layer of the estimator; 0 without an estimator.
        incomplete: names of kernels whose bytes and operations are not all known.
    """

    family: str
    streams: int
    hop_tokens: int
    spoken_s: float
    stages: dict[str, Work]
    step_launches: int
    layer_launches: int
    incomplete: list[str]


class Streams:
    """Streams of one voice on stages that are counted; all are at the same position.

    Args:
        counter: counter, which is active.
    """

    def __init__(
        self, counter: LaunchCounter, config: ModelConfig, stages: Mapping[Any, Any], count: int
    ) -> None:
        self._counter, self._config, self._stages = counter, config, list(stages.values())
        prompt = PROMPT_TOKENS if config.takes_prompt else 0
        voice: Any = a_voice(config, prompt_tokens=prompt) if config.takes_voice else None
        self._prompt = prompt
        self._grid = config.grid(prompt)
        self._position = self._grid.prefix
        self._handles = [[stage.open(voice) for stage in self._stages] for _ in range(count)]

    @property
    def spoken_tokens(self) -> int:
        """Tokens whose audio was computed."""
        return max(0, self._position - self._prompt)

    def advance(self, tokens: int) -> None:
        """Computes the next chunk of every stream. A first chunk also computes the end of the
        prompt.
        """
        config, start = self._config, self._position
        first = 0 if self.spoken_tokens else self._grid.first_boundary
        stop = max(start, first) + tokens
        count = stop - start + config.lookahead_tokens
        values = config.tokens.zeros(count)
        chunks: list[Any] = [TokenChunk(values, start, stop, last=False)] * len(self._handles)
        for number, stage in enumerate(self._stages):
            handles = [of_stream[number] for of_stream in self._handles]
            results = stage.advance(list(zip(handles, chunks, strict=True)))
            of_prompt = config.token_mel_ratio * max(0, self._prompt - start)
            if number + 1 < len(self._stages):
                chunks = [FrameChunk(mel[:, of_prompt:], last=False) for mel in results]
        self._position = stop

    def counted(self, tokens: int) -> list[Counted]:
        """Computes the next chunk of every stream, and returns its launches."""
        with self._counter.count() as launches:
            self.advance(tokens)
        return launches


def chunk_works(
    family: str,
    config: ModelConfig,
    streams: Sequence[int] = STREAMS,
    spoken_s: Sequence[float] = SPOKEN_S,
    hop_tokens: int = 0,
    steps: int = 0,
) -> Iterator[ChunkWork]:
    """Counts chunks of one model.

    Args:
        family: name of the family, for the results.
        streams: numbers of streams in a batch.
        spoken_s: seconds of speech before the chunk, rising; 0 for a first chunk.
        hop_tokens: new tokens of a chunk, whole attention blocks; 0 for the first hop of the model.
        steps: ODE steps; 0 for the number of the model.
    """
    stream = StreamConfig(steps=(steps,) if steps else ())
    first, longest = config.hops(stream)
    hop, steps = hop_tokens or first, steps or config.ode_steps
    with LaunchCounter() as counter:
        stages = counted_stages(counter, config, stream).by_name
        # Not counted: the first chunk of a model fills tables that all later chunks use.
        Streams(counter, config, stages, 1).advance(first)
        for count in streams:
            batch = Streams(counter, config, stages, count)
            for seconds in spoken_s:
                tokens = -(-round(seconds * config.token_frame_rate) // first) * first
                # Without a cache, no chunk depends on its position.
                if not stages[config.stages[0]].usage().capacity:
                    tokens = min(tokens, _UNCACHED_HOPS * first)
                while batch.spoken_tokens < tokens:
                    blocks = -(-(tokens - batch.spoken_tokens) // config.block_tokens)
                    missing = blocks * config.block_tokens
                    batch.advance(min(longest, missing) if batch.spoken_tokens else first)
                launches = batch.counted(hop)
                works = stage_works(config.stages, launches, count)
                flow = [launch for launch, stage, _ in launches if stage == "flow"]
                unknown = {launch.name for launch, *_ in launches if not launch.complete}
                step, layer = repeats(flow, steps)
                yield ChunkWork(family, count, hop, seconds, works, step, layer, sorted(unknown))


def stage_works(
    stages: Sequence[str], launches: Sequence[Counted], streams: int
) -> dict[str, Work]:
    """Returns the work of each stage, and its sum, for the launches of a batch."""
    names = *((ENCODER,) if "flow" in stages else ()), OUTSIDE, *stages
    works = {name: Work() for name in names}
    total = Work()
    for launch in launches:
        works[launch.stage].add(launch)
        total.add(launch)
    host = [HOST_US[name] for name in stages]
    host_us = sum(first + further * (streams - 1) for first, further in host)
    works[OUTSIDE].expected_ms = max(works[OUTSIDE].expected_ms, host_us / 1000)
    total.expected_ms = sum(work.expected_ms for work in works.values())
    return {**works, SUM: total}


def repeats(launches: Sequence[Launch], steps: int) -> tuple[int, int]:
    """Returns the launches of one ODE step, and of one layer of the estimator.

    They are distances between launches of attention, of which a layer has one. The distance that
    occurs most often is the one between two layers. Codecs, and a single step, give no distance
    between steps, and 0 is returned.
    """
    if not steps:
        return 0, 0
    positions = [position for position, launch in enumerate(launches) if launch.attention]
    layers = len(positions) // steps
    distances = Counter(after - before for before, after in pairwise(positions)) or Counter([0])
    step = positions[layers] - positions[0] if steps > 1 else 0
    return step, distances.most_common(1)[0][0]
