"""Table of kernel launches, bytes and floating-point operations of a chunk, and of the least time
that they take on one H200.

The code itself is counted on torch's device `meta`, without a GPU: every family at its published
size, in float16, as a GPU runs it. The times are predictions from the rates below, not
measurements.

    .venv/bin/python -m benchmarks.launches                              # one minute
    .venv/bin/python -m benchmarks.launches --families CosyVoice3 --streams 1 --spoken 0
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.counted_stages import counted_stages
from benchmarks.environment import describe, save
from benchmarks.launch_counter import ENCODER, OUTSIDE, Counted, Launch, LaunchCounter
from benchmarks.models import a_voice, public_configs
from token2wav import StreamConfig, Voice
from token2wav.execution.stages import FrameChunk, TokenChunk
from token2wav.model_config import ModelConfig

# Rates of one H200, each per second. The first two were seen on such a machine. The others are of
# NVIDIA's data sheet (H200 SXM, without sparsity). Float64 is the rate of the matrix units.
RATES = {
    "bytes": 4.3e12,
    "float16": 790e12,
    "tf32": 494e12,
    "float32": 67e12,
    "float64": 67e12,
}
# Least time of a launch, in microseconds, inside a CUDA graph and outside. These are assumptions: a
# small kernel takes 2 to 3 us in a graph, and the host needs about 5 us to launch one.
CAPTURED_US, LOOSE_US = 2.5, 5.0
PROMPT_TOKENS = 75
STREAMS, SPOKEN_S = (1, 16, 64), (0.0, 2.0, 10.0, 30.0)
_UNCACHED_HOPS = 4  # hops after which every chunk of a flow without a cache costs the same
SUM = "sum"


@dataclass
class Work:
    """Work of one stage for one batch of chunks.

    Attributes:
        launches: number of kernel launches.
        captured: number of launches that are nodes of CUDA graphs.
        from_host: number of copies from the memory of the host.
        bytes: bytes that the launches read and write.
        operations: floating-point operations, by kind.
        least_ms: sum of the least times of the launches, in ms. A launch takes at least the time of
            an empty one, of its bytes and of its operations, whichever is longest.
    """

    launches: int = 0
    captured: int = 0
    from_host: int = 0
    bytes: float = 0.0
    operations: dict[str, float] = field(default_factory=dict)
    least_ms: float = 0.0

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


@dataclass(frozen=True)
class ChunkWork:
    """Work of a chunk of each stream of a batch.

    Attributes:
        family: name of the family.
        streams: number of streams.
        hop_tokens: new tokens of each chunk. A first chunk also computes the end of the prompt.
        spoken_s: seconds of speech before the chunk; 0 for a first chunk.
        stages: work by stage: `encoder`, `outside` (host code around the graphs), the stages of the
            model, and `sum`.
        step_launches: launches of one ODE step.
        layer_launches: launches of one layer of the estimator.
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


def least_us(launch: Launch, *, captured: bool) -> float:
    """Returns the least time of a launch in microseconds, at `RATES`."""
    empty = CAPTURED_US if captured else LOOSE_US
    seconds = launch.bytes / RATES["bytes"], launch.operations / RATES[launch.kind]
    return max(empty, 1e6 * max(seconds))


class Streams:
    """Streams of one voice on stages that are counted; all are at the same position.

    Args:
        counter: active counter.
        config: configuration of the model.
        stages: stages by name, flow and vocoder.
        count: number of streams.
    """

    def __init__(
        self, counter: LaunchCounter, config: ModelConfig, stages: Mapping[Any, Any], count: int
    ) -> None:
        self._counter, self._config = counter, config
        self._flow, self._vocoder = stages["flow"], stages["vocoder"]
        voice: Voice = a_voice(config, prompt_tokens=PROMPT_TOKENS)
        self._prompt = len(voice.prompt_tokens)
        self._position = config.grid(self._prompt).prefix
        self._handles = [(self._flow.open(voice), self._vocoder.open()) for _ in range(count)]

    @property
    def spoken_tokens(self) -> int:
        """Number of tokens whose audio was computed."""
        return max(0, self._position - self._prompt)

    def advance(self, tokens: int) -> None:
        """Computes the next chunk of every stream."""
        config, start = self._config, self._position
        stop = max(start, self._prompt) + tokens
        given = np.zeros((stop - start + config.lookahead_tokens, *config.token_shape), np.int32)
        chunk = TokenChunk(given, start, stop, last=False)
        mels = self._flow.advance([(flow, chunk) for flow, _ in self._handles])
        of_prompt = config.token_mel_ratio * max(0, self._prompt - start)
        frames = [FrameChunk(mel[:, of_prompt:], last=False) for mel in mels]
        handles = [vocoder for _, vocoder in self._handles]
        self._vocoder.advance(list(zip(handles, frames, strict=True)))
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
        config: configuration of the model.
        streams: numbers of streams in a batch.
        spoken_s: seconds of speech before the chunk, rising; 0 for a first chunk.
        hop_tokens: new tokens of a chunk, whole attention blocks; 0 for the first hop of the model.
        steps: number of ODE steps; 0 for the number of the model.
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
                if (
                    not stages["flow"].usage().capacity
                ):  # no cache: no chunk depends on its position
                    tokens = min(tokens, _UNCACHED_HOPS * first)
                while batch.spoken_tokens < tokens:
                    missing = tokens - batch.spoken_tokens
                    batch.advance(min(longest, missing) if batch.spoken_tokens else first)
                launches = batch.counted(hop)
                names = ENCODER, OUTSIDE, *config.stages, SUM
                works = {name: Work() for name in names}
                for each in launches:
                    works[each.stage].add(each)
                    works[SUM].add(each)
                flow = [each.launch for each in launches if each.stage == "flow"]
                unknown = {each.launch.name for each in launches if not each.launch.complete}
                step, layer = repeats(flow, steps)
                yield ChunkWork(family, count, hop, seconds, works, step, layer, sorted(unknown))


def repeats(launches: Sequence[Launch], steps: int) -> tuple[int, int]:
    """Returns the launches of one ODE step, and of one layer of the estimator.

    They are distances between launches of attention, of which a layer has one. The distance that
    occurs most often is the one between two layers. A single step gives no distance between steps,
    and 0 is returned.
    """
    places = [place for place, launch in enumerate(launches) if launch.attention]
    layers = len(places) // steps
    distances = Counter(after - before for before, after in pairwise(places)) or Counter([0])
    step = places[layers] - places[0] if steps > 1 else 0
    return step, distances.most_common(1)[0][0]


def columns(work: ChunkWork) -> dict[str, str]:
    """Returns the cells of a work in a table, by the heads of their columns."""
    counts = {name: each.launches for name, each in work.stages.items()}
    parts = [each for name, each in work.stages.items() if name != SUM]
    total = work.stages[SUM]
    return {
        "family": work.family,
        "streams": str(work.streams),
        "tokens": str(work.hop_tokens),
        "after (s)": f"{work.spoken_s:g}" if work.spoken_s else "first",
        **{name: f"{counts[name]:,}" for name in (ENCODER, OUTSIDE, "flow")},
        "a step": f"{work.step_launches:,}",
        "a layer": f"{work.layer_launches:,}",
        **{name: f"{counts[name]:,}" for name in ("vocoder", SUM)},
        "GB": f"{total.bytes / 1e9:.1f}",
        "TFLOP": f"{sum(total.operations.values()) / 1e12:.2f}",
        "least ms": f"{total.least_ms:.1f}",
        "encoder + outside + flow + vocoder": " + ".join(f"{each.least_ms:.1f}" for each in parts),
    }


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Formats rows with the same keys as a table; the keys are the heads of the columns."""
    lines = [rows[0], dict.fromkeys(rows[0], "---"), *rows]
    return "\n".join(
        f"| {' | '.join(line if number == 0 else line.values())} |"
        for number, line in enumerate(lines)
    )


def beside_measured(chunks: Iterable[Mapping[str, Any]]) -> str:
    """Formats the launches and the least times of measured chunks, with the measured times.

    Args:
        chunks: rows of section chunks of the GPU report, for CosyVoice3 at its public size.
    """
    rows = []
    for chunk in chunks:
        work = _work_like(chunk["streams"], chunk["hop_tokens"], chunk["spoken_s"])
        flow, vocoder, total = (chunk[name][0] for name in ("flow_ms", "vocoder_ms", "total_ms"))
        measured = {"measured ms": f"{total:.1f}", "flow + vocoder": f"{flow:.1f} + {vocoder:.1f}"}
        rows.append(columns(work) | measured)
    return markdown(rows)


@cache
def _work_like(streams: int, hop_tokens: int, spoken_s: float) -> ChunkWork:
    config = public_configs()["CosyVoice3"]
    [work] = chunk_works("CosyVoice3", config, (streams,), (spoken_s,), hop_tokens)
    return work


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    configs = public_configs()
    parser.add_argument("--families", nargs="+", choices=configs, default=list(configs))
    parser.add_argument("--streams", nargs="+", type=int, default=STREAMS, metavar="N")
    parser.add_argument(
        "--spoken",
        nargs="+",
        type=float,
        default=SPOKEN_S,
        metavar="S",
        help="seconds of speech before the chunk; 0 for a first chunk (default: 0 2 10 30)",
    )
    parser.add_argument(
        "--hop",
        type=int,
        default=0,
        metavar="N",
        help="new tokens of a chunk, in whole blocks (default: first hop of the model)",
    )
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N", help="ODE steps (default: those of the model)"
    )
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/launches.json"
    )
    options = parser.parse_args()
    if find_spec("triton") is None:
        parser.error("the Triton language is not installed; run: pip install 'token2wav[gpu]'")
    works = [
        work
        for family in options.families
        for work in chunk_works(
            family,
            configs[family],
            options.streams,
            sorted(options.spoken),
            options.hop,
            options.steps,
        )
    ]
    print(markdown([columns(work) for work in works]))
    if unknown := {name for work in works for name in work.incomplete}:
        print(f"Pages that these kernels read are not counted: {', '.join(sorted(unknown))}")
    if options.save:
        assumed = {"rates": RATES, "captured_us": CAPTURED_US, "loose_us": LOOSE_US}
        rows = [asdict(work) for work in works]
        for stage in (stage for row in rows for stage in row["stages"].values()):
            stage |= {"bytes": round(stage["bytes"]), "least_ms": round(stage["least_ms"], 3)}
        save("launches", {"environment": describe(), "assumed": assumed, "rows": rows})


if __name__ == "__main__":
    main()
