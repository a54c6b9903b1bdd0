"""Streams of a stage of the ensemble: batches, errors of single streams, and closed streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from token2wav.errors import BackendError, DeviceLostError, LimitError, Token2WavError
from token2wav.serving.audio_output import AudioFormat
from token2wav_server.ensemble import stage_streams
from token2wav_server.ensemble.stage_streams import Label, Part, StageStreams

OPEN_SECONDS = 10.0
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
        self.stage = StageStreams("flow", self.work, most, OPEN_SECONDS, lambda: self.now)

    def part(self, stream: int, index: int, content: str = "ok") -> Part:
        return Part(Label(stream, index, False, AudioFormat()), content, self._answer)

    def run(self, *parts: Part) -> list[str]:
        """Returns the answers to these parts."""
        self.answers.clear()
        self.stage.run(parts)
        return list(self.answers)

    def _answer(self, result: str | Token2WavError) -> None:
        self.answers.append(f"error {result}" if isinstance(result, Token2WavError) else result)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reasons for which the process would have ended. No letter is sent."""
    reasons: list[str] = []
    monkeypatch.setattr(stage_streams, "send", lambda *_: None)
    monkeypatch.setattr(stage_streams, "end_process", lambda why="lost": reasons.append(why))
    return reasons


def test_streams_share_batches_of_bounded_size() -> None:
    stage = Stage(most=4)
    for index in range(2):
        stage.run(*(stage.part(stream, index, f"chunk{index}") for stream in range(6)))
    assert stage.work.batches == [4, 2, 4, 2]
    assert stage.answers == ["chunk1 2"] * 6


def test_broken_numbers_end_their_own_stream_only(stage: Stage) -> None:
    parts = [stage.part(1, 0, "a"), stage.part(2, 0, BROKEN), stage.part(3, 0, "c")]
    assert stage.run(*parts) == ["a 1", "error backend: NaN", "c 1"]
    stage.stage.close([2])  # as the accumulator does after an error
    assert stage.stage.open_streams == len(stage.work.open_states) == 2
    assert stage.run(stage.part(1, 1, "a")) == ["a 2"]


def test_stream_that_cannot_open_harms_no_other(stage: Stage) -> None:
    assert stage.run(stage.part(1, 0, REFUSED), stage.part(2, 0, "b")) == [
        "error cache: full",
        "b 1",
    ]
    assert stage.stage.open_streams == 1


def test_a_failed_engine_ends_its_batch_only(stage: Stage) -> None:
    failed = "error backend: RuntimeError: the device is gone"
    assert stage.run(stage.part(1, 0, CRASHES), stage.part(2, 0)) == [failed, failed]
    stage.stage.close([1, 2])
    assert not stage.work.open_states
    assert stage.run(stage.part(3, 0, "c")) == ["c 1"]


def test_a_lost_gpu_ends_the_process(stage: Stage, ends: list[str]) -> None:
    stage.run(stage.part(1, 0, CRASHES))
    assert not ends
    assert stage.run(stage.part(2, 0, LOST)) == ["error backend: the GPU cannot be used any more"]
    assert ends == ["lost"]


def test_streams_that_nobody_closes_are_freed_in_the_end(stage: Stage) -> None:
    stage.run(stage.part(1, 0), stage.part(2, 0))
    stage.now = OPEN_SECONDS
    stage.run(stage.part(1, 1))
    stage.now += 1
    stage.stage.check()
    assert stage.stage.open_streams == len(stage.work.open_states) == 1
    stage.stage.close([1, 2, 3])  # unknown ones too
    assert not stage.work.open_states


def test_chunks_out_of_order_are_refused(stage: Stage) -> None:
    """The accumulator sends none."""
    assert stage.run(stage.part(1, 0), stage.part(1, 0), stage.part(2, 1)) == [
        "error stream: chunk 0 arrived instead of chunk 1",
        "error stream: chunk 1 arrived instead of chunk 0",
        "ok 1",
    ]
    assert stage.run(stage.part(1, 1)) == ["ok 2"]


@pytest.mark.parametrize(("most", "seconds"), [(1, 180), (8, 180), (32, 720)])
def test_a_hanging_batch_ends_the_process(
    most: int, seconds: int, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger batch may take longer. `check` does not wait for the batch."""
    stage = Stage(most)
    advance = stage.work.advance

    def slow(batch: Sequence[tuple[int, str]]) -> list[str | BackendError]:
        began = stage.now
        for stage.now in (began + seconds, began + seconds + 1):
            stage.stage.check()
        return advance(batch)

    monkeypatch.setattr(stage.work, "advance", slow)
    assert stage.run(stage.part(1, 0)) == ["ok 1"]
    stage.now += 10 * seconds
    stage.stage.check()  # idle, not hanging
    assert ends == [f"hangs (its batch has run for {seconds + 1} s)"]
