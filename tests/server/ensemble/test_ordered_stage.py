"""Stage of the ensemble: order of chunks, errors of single streams, and idle streams."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from token2wav.config import LimitConfig
from token2wav.errors import BackendError, DeviceLostError, InputError, LimitError, Token2WavError
from token2wav.serving.audio_output import AudioFormat
from token2wav_server.ensemble.ordered_stage import Label, OrderedStage, Part

IDLE_SECONDS = 10.0
BROKEN, REFUSED, CRASHES, LOST = "broken", "refused", "crashes", "lost"


@dataclass
class CountingStage:
    """Stage that returns the number of a stream's `advance` calls, and fails on demand."""

    open_states: set[int] = field(default_factory=set)
    batches: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)

    def open(self, label: Label, content: str) -> int:
        if content == REFUSED:
            raise LimitError("cache: full")
        state = len(self.counts)
        self.counts[state] = 0
        self.open_states.add(state)
        return state

    def advance(self, batch: Sequence[tuple[int, str]]) -> list[str | BackendError]:
        self.batches.append(len(batch))
        if any(content == CRASHES for _, content in batch):
            raise RuntimeError("the device\nis gone")
        if any(content == LOST for _, content in batch):
            raise DeviceLostError("backend: the GPU cannot be used any more")
        results: list[str | BackendError] = []
        for state, content in batch:
            assert state in self.open_states
            self.counts[state] += 1
            results.append(
                BackendError("backend: NaN")
                if content == BROKEN
                else f"{content} {self.counts[state]}"
            )
        return results

    def close(self, state: int) -> None:
        self.open_states.remove(state)


class Stage:
    """Stage with its own clock. `answers` are in the order in which they came."""

    def __init__(self, most: int = 8) -> None:
        self.now = 0.0
        self.work = CountingStage()
        self.answers: list[str] = []
        limits = LimitConfig(idle_seconds=IDLE_SECONDS, batch_streams=most)
        self.lost = 0
        self.hung: list[float] = []
        self.stage = OrderedStage(
            self.work,
            limits,
            on_device_lost=self._lose,
            on_hang=self.hung.append,
            clock=lambda: self.now,
        )

    def part(
        self, stream: int, index: int, content: str | Token2WavError = "ok", *, last: bool = False
    ) -> Part:
        return Part(Label(stream, index, last, AudioFormat(), 0.0), content, self._answer)

    def run(self, *parts: Part) -> list[str]:
        """Returns the answers to these parts, and to earlier parts that waited for them."""
        self.answers.clear()
        self.stage.run(parts)
        return list(self.answers)

    def _lose(self) -> None:
        self.lost += 1

    def _answer(self, result: str | Token2WavError) -> None:
        self.answers.append(f"error {result}" if isinstance(result, Token2WavError) else result)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("together", [True, False])
def test_chunks_of_a_stream_run_in_order_however_they_come(
    stage: Stage, order: tuple[int, ...], together: bool
) -> None:
    parts = [stage.part(1, index, f"chunk{index}", last=index == 2) for index in order]
    answers = (
        stage.run(*parts) if together else [answer for part in parts for answer in stage.run(part)]
    )
    assert answers == ["chunk0 1", "chunk1 2", "chunk2 3"]
    assert not stage.work.open_states


def test_streams_share_batches_of_bounded_size() -> None:
    stage = Stage(most=4)
    stage.run(*(stage.part(stream, index) for stream in range(6) for index in range(2)))
    assert stage.work.batches == [4, 4, 4]


def test_broken_numbers_end_their_own_stream_only(stage: Stage) -> None:
    parts = [
        stage.part(1, 0, "a"),
        stage.part(2, 0, BROKEN),
        stage.part(2, 1),
        stage.part(3, 0, "c"),
    ]
    assert stage.run(*parts) == ["a 1", "error backend: NaN", "error backend: NaN", "c 1"]
    assert stage.stage.open_streams == 2
    assert stage.run(stage.part(2, 2), stage.part(1, 1, "a")) == ["error backend: NaN", "a 2"]


def test_stream_that_cannot_open_harms_no_other(stage: Stage) -> None:
    assert stage.run(stage.part(1, 0, REFUSED), stage.part(2, 0, "b")) == [
        "error cache: full",
        "b 1",
    ]


def test_a_failed_engine_ends_its_batch_only(stage: Stage) -> None:
    failed = "error backend: RuntimeError: the device is gone"
    assert stage.run(stage.part(1, 0, CRASHES), stage.part(2, 0)) == [failed, failed]
    assert not stage.work.open_states
    assert stage.run(stage.part(3, 0, "c")) == ["c 1"]


def test_a_lost_gpu_is_reported_so_that_the_process_ends(stage: Stage) -> None:
    stage.run(stage.part(1, 0, CRASHES))
    assert not stage.lost
    assert stage.run(stage.part(2, 0, LOST)) == ["error backend: the GPU cannot be used any more"]
    assert stage.lost


def test_an_error_of_an_earlier_stage_frees_the_stream(stage: Stage) -> None:
    assert stage.run(stage.part(1, 0, "a")) == ["a 1"]
    assert stage.run(stage.part(1, 1, InputError("tokens", "bad"))) == ["error tokens: bad"]
    assert not stage.work.open_states


def test_idle_stream_is_freed_and_later_chunks_get_an_error(stage: Stage) -> None:
    stage.run(stage.part(1, 0), stage.part(2, 0), stage.part(2, 2))
    stage.now = IDLE_SECONDS
    stage.stage.expire()
    assert stage.stage.open_streams == 2
    stage.run(stage.part(1, 1))
    stage.now += 1
    stage.stage.expire()
    dropped = "error stream: no chunk for 10 s, so the stream was closed"
    assert stage.answers == ["ok 2", dropped]  # the chunk that waited
    assert stage.run(stage.part(2, 1)) == [dropped]
    assert stage.stage.open_streams == 1


def test_lost_streams_are_forgotten_in_the_end(stage: Stage) -> None:
    stage.run(stage.part(1, 0, BROKEN), stage.part(2, 5))
    for _ in range(2):
        stage.now += IDLE_SECONDS + 1
        stage.stage.expire()
    # The stage takes them for chunks of new streams, and waits for the first chunks.
    assert not stage.run(stage.part(1, 1), stage.part(2, 6))


def test_chunk_that_comes_twice_is_refused(stage: Stage) -> None:
    assert stage.run(stage.part(1, 0), stage.part(1, 0)) == [
        "error stream: chunk 0 was received twice",
        "ok 1",
    ]
    assert stage.run(stage.part(1, 0)) == ["error stream: chunk 0 was received twice"]
    assert stage.run(stage.part(1, 1)) == ["ok 2"]


@pytest.mark.parametrize(("most", "seconds"), [(1, 180.0), (8, 180.0), (32, 720.0)])
def test_a_hanging_batch_is_reported_while_it_runs(
    most: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger batch may take longer. `watch` does not need the lock that the batch holds."""
    stage = Stage(most)
    advance = stage.work.advance

    def slow(batch: Sequence[tuple[int, str]]) -> list[str | BackendError]:
        began = stage.now
        for stage.now in (began + seconds, began + seconds + 1):
            stage.stage.watch()
        return advance(batch)

    monkeypatch.setattr(stage.work, "advance", slow)
    assert stage.run(stage.part(1, 0)) == ["ok 1"]
    assert stage.hung == [seconds + 1]
    stage.now += 10 * seconds
    stage.stage.watch()  # idle, not hanging
    assert stage.hung == [seconds + 1]


def test_a_stream_that_failed_computes_no_more() -> None:
    """The flow may send more chunks of a stream that the vocoder has lost; each costs the vocoder
    an answer only.
    """
    stage = Stage()
    stage.run(stage.part(1, 0, BROKEN))
    batches = len(stage.work.batches)
    assert stage.run(stage.part(1, 1), stage.part(1, 2, last=True)) == ["error backend: NaN"] * 2
    assert len(stage.work.batches) == batches
    assert not stage.work.open_states
