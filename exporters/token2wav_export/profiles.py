"""Optimization profiles of an engine: the ranges of shapes that the chunks of streams can have
under a configuration.
"""

from __future__ import annotations

from typing import NamedTuple

from token2wav.assembly import Exportable
from token2wav.cache.paged_kv_cache import BRANCHES
from token2wav.config import StreamConfig
from token2wav.config.model_config import ModelConfig
from token2wav.published.artifacts import GraphName
from token2wav.serving.hops import HopSchedule
from token2wav_export.signatures import Axis, Signature

# The smallest, the best and the largest shape of each input.
Shapes = dict[str, tuple[tuple[int, ...], ...]]


class Span(NamedTuple):
    """Range of a free dimension: the smallest and largest size of a profile, and the size that the
    engine is tuned for.
    """

    smallest: int
    best: int
    largest: int


Profile = dict[str, Span]  # by free dimension


class ProfileLoad(NamedTuple):
    """Load that an engine must support."""

    stream: StreamConfig  # settings that cut streams into chunks
    max_streams: int  # largest number of streams in one batch
    history_seconds: float  # longest prompt and past that a chunk attends to


def chunk_frames(stream: StreamConfig, config: ModelConfig) -> list[int]:
    """Returns the frames of every hop of a schedule, ascending.

    A longer chunk runs on torch, see `ExportedStep`. Raises ConfigError if the schedule does not
    fit the model.
    """
    schedule = HopSchedule.of(stream, config)
    hops = {schedule.hop(index) for index in range(schedule.longest.bit_length())}
    return sorted(count * config.token_mel_ratio for count in hops)


def profiles(graph: GraphName, load: ProfileLoad, model: Exportable) -> list[Profile]:
    """Returns the profiles of a graph.

    The graph `step` has one profile for every hop. Each covers the chunks that are longer than the
    hop before and no longer than its own hop. Raises ConfigError if the schedule does not fit the
    model.
    """
    config = model.config
    config.check(load.stream)
    chunks = chunk_frames(load.stream, config)
    frame_rate = config.token_frame_rate * config.token_mel_ratio
    block = config.block_tokens * config.token_mel_ratio
    history = -(-int(load.history_seconds * frame_rate) // block) * block  # whole blocks
    branches = BRANCHES if model.guidance else 1  # rows per stream
    rows = Span(branches, branches, branches * load.max_streams)
    if graph == "step":
        past = Span(0, history // 2, history)
        starts = [1, *(largest + 1 for largest in chunks)]
        return [
            {"rows": rows, "frames": Span(start, largest, largest), "past": past}
            for start, largest in zip(starts, chunks, strict=False)
        ]
    if graph == "vocoder":
        return [{"rows": Span(1, 1, load.max_streams), "frames": Span(1, chunks[0], chunks[-1])}]
    if graph == "vocoder-whole":
        rows = Span(1, 1, load.max_streams)
    return [{"rows": rows, "frames": Span(1, chunks[-1] + history // 2, chunks[-1] + history)}]


def shapes(profile: Profile, signature: Signature) -> Shapes:
    """Returns the shapes of all inputs that have a free dimension.

    All shapes are made from the same sizes, so the shapes of different inputs fit together.
    """
    ends = [{name: getattr(span, end) for name, span in profile.items()} for end in Span._fields]
    return {
        spec.name: tuple(spec.of(sizes) for sizes in ends)
        for spec in signature.inputs
        if any(isinstance(axis, Axis) for axis in spec.shape)
    }
