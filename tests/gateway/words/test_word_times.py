"""Times of words: a real process of an aligner, its bounds, and aligners that misbehave."""

from __future__ import annotations

import asyncio
import errno
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.patience import until
from testkit.rigs.processes import stat_fields
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import AlignerSettings, SettingsError, check_plugin
from token2wav_gateway.words import worker as module
from token2wav_gateway.words.aligner_worker import align, checked
from token2wav_gateway.words.aligners import ALIGNERS, Word
from token2wav_gateway.words.word_times import SpokenText, WordTimes
from token2wav_gateway.words.worker import WorkerError

SECOND = np.zeros(24_000, np.int16)
GOOD = "ab c"
ALIGNED = [("a", 0, 333), ("b", 333, 667), ("c", 667, 1000)]
PATIENT_S = 60.0  # the most that settings allow

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("made_up_aligners")]


@asynccontextmanager
async def aligning(
    name: str | None, metrics: Metrics | None = None, **settings: Any
) -> AsyncIterator[WordTimes]:
    """Context manager of an aligner, after which no process is left."""
    before = set(multiprocessing.active_children())
    word_times = WordTimes(
        AlignerSettings(**{"name": name, "timeout_s": PATIENT_S} | settings), metrics or Metrics()
    )
    word_times.start()
    try:
        yield word_times
    finally:
        await word_times.close()
    # `join` would return early where a thread of the pool is just reaping the process.
    until(lambda: not set(multiprocessing.active_children()) - before)


async def times_of(
    word_times: WordTimes, text: str, samples: NDArray[np.int16]
) -> list[tuple[str, int, int]] | None:
    """Returns the words of a text and their times in milliseconds."""
    spoken = SpokenText(word_times, text)
    spoken.add(samples)
    words, _ = await spoken.rest()
    return None if words is None else [tuple(word.values()) for word in words]


def outcomes(metrics: Metrics) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for metric in metrics.alignments.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


async def test_nothing_to_align_is_an_empty_list() -> None:
    async with aligning("Letters") as word_times:
        assert await times_of(word_times, "...", SECOND) == []
        assert await times_of(word_times, GOOD, SECOND[:0]) == []
    async with aligning(None) as none:
        assert await times_of(none, GOOD, SECOND) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Exits", "its process has crashed"),
        ("Crashes", "its process has crashed"),
        ("Raises", "a text failed (ValueError)"),
        ("Greedy", "a text failed (MemoryError)"),
        ("Floods", "its answer has "),
    ],
)
async def test_a_failed_text_costs_only_its_own_times(
    name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with aligning(name, metrics := Metrics()) as word_times:
        assert await times_of(word_times, "bad secret", SECOND) is None
        assert await times_of(word_times, GOOD, SECOND) == ALIGNED
    assert outcomes(metrics) == {"failed": 1, "done": 1}
    [message] = caplog.messages
    assert message.startswith(f"aligner: {reason}")
    assert "secret" not in caplog.text


@pytest.mark.parametrize("name", ["Hangs", "HangsDeaf"])
async def test_an_aligner_that_hangs_is_replaced(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with aligning(name, metrics := Metrics(), timeout_s=3) as word_times:
        hung = await process_of(word_times)
        assert await times_of(word_times, "bad", SECOND) is None
        until(lambda: not running_in(hung))
    assert outcomes(metrics) == {"late": 1}
    async with aligning(name) as word_times:
        assert await times_of(word_times, GOOD, SECOND) == ALIGNED
    assert caplog.messages == ["aligner: no times within 3 s"]


async def process_of(word_times: WordTimes) -> int:
    """Returns the process of an aligner, which is also the number of its group of processes."""
    worker = word_times.worker
    assert worker is not None
    process = await worker.started()
    assert process is not None
    return process.number


async def end_process_of(word_times: WordTimes) -> None:
    """Ends the process of an aligner, and waits until its pool has noticed the end."""
    worker = word_times.worker
    assert worker is not None
    process = await worker.started()
    assert process is not None
    os.kill(process.number, signal.SIGKILL)
    until(lambda: process.pool._broken)


def running_in(group: int) -> list[int]:
    """Returns the processes of a group that have not ended."""
    running = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process may end after it was listed
            state, _, its_group, *_ = stat_fields(int(folder.name))
            running += [int(folder.name)] * (int(its_group) == group and state not in "ZX")
    return running


async def test_a_process_that_ends_between_two_texts_is_replaced() -> None:
    async with aligning("Letters") as word_times:
        await end_process_of(word_times)
        assert await times_of(word_times, GOOD, SECOND) == ALIGNED


@pytest.mark.parametrize("name", ["Helped", "HelpedByFork"])
async def test_processes_of_an_aligner_that_ends_between_two_texts_end_too(name: str) -> None:
    async with aligning(name) as word_times:
        assert await times_of(word_times, GOOD, SECOND) == ALIGNED
        group = await process_of(word_times)
        assert len(running_in(group)) == 2
        await end_process_of(word_times)
        until(lambda: not running_in(group))
        assert await times_of(word_times, GOOD, SECOND) == ALIGNED


async def test_an_aligner_that_ends_within_a_text_fails_it_though_a_process_of_it_goes_on() -> None:
    async with aligning("Forks", metrics := Metrics()) as word_times:
        group = await process_of(word_times)
        assert await times_of(word_times, "bad", SECOND) is None
        until(lambda: not running_in(group))
    assert outcomes(metrics) == {"failed": 1}


@pytest.mark.parametrize("name", ["ForksAndAnswers", "AnswersTwice"])
async def test_a_late_answer_is_not_taken_for_the_next_text(name: str) -> None:
    """The answer to the first text would pass every check of the next one."""

    async with aligning(name) as word_times:
        process = await process_of(word_times)
        await times_of(word_times, "bad", SECOND[::2])
        if name == "ForksAndAnswers":  # the other one would get audio of texts that are open
            until(lambda: running_in(process) == [process])
        await asyncio.sleep(1)
        times = [await times_of(word_times, "bad", SECOND) for _ in range(2)]
        whole = [("b", 0, 333), ("a", 333, 667), ("d", 667, 1000)]
        assert all(words in (None, whole) for words in times), times
        assert await times_of(word_times, GOOD, SECOND) == ALIGNED


async def test_texts_behind_one_that_hangs_are_late_too_and_do_not_end_the_process() -> None:
    async with aligning("Hangs", metrics := Metrics(), timeout_s=4) as word_times:
        await process_of(word_times)
        hanging = asyncio.create_task(times_of(word_times, "bad", SECOND))
        await asyncio.sleep(1)
        waiting = [asyncio.create_task(times_of(word_times, GOOD, SECOND)) for _ in range(3)]
        assert await hanging is None
        # The new process may need longer to load than the rest of their time.
        results = await asyncio.gather(*waiting)
        assert all(words in (None, ALIGNED) for words in results)
    assert sum(outcomes(metrics).values()) == 4


async def test_few_texts_may_wait() -> None:
    async with aligning("Hangs", metrics := Metrics(), waiting=2) as word_times:
        waiting = [asyncio.create_task(times_of(word_times, "bad", SECOND)) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert await times_of(word_times, GOOD, SECOND) is None
        for task in waiting:
            task.cancel()
    assert outcomes(metrics)["refused"] == 1


async def test_a_client_that_leaves_does_not_disturb_the_next_answer() -> None:
    async with aligning("Letters") as word_times:
        for _ in range(5):
            leaving = asyncio.create_task(times_of(word_times, "other text", SECOND))
            await asyncio.sleep(0.01)
            leaving.cancel()
            assert await times_of(word_times, GOOD, SECOND) == ALIGNED


async def test_what_an_aligner_prints_is_no_answer() -> None:
    async with aligning("Prints") as word_times:
        assert await times_of(word_times, GOOD, SECOND) == ALIGNED


async def test_an_aligner_that_cannot_be_loaded(caplog: pytest.LogCaptureFixture) -> None:
    async with aligning("FailsToLoad", metrics := Metrics()) as word_times:
        assert await times_of(word_times, GOOD, SECOND) is None
        assert await times_of(word_times, GOOD, SECOND) is None  # not loaded again at once
    assert outcomes(metrics) == {"failed": 2}
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert errors[0].startswith("aligner FailsToLoad: OSError: no model")


def _no_descriptors(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


def _no_threads(*_: Any) -> NoReturn:
    raise RuntimeError("can't start new thread")


def _hard_limit(memory_mib: int) -> NoReturn:  # in the process
    raise ValueError("not allowed to raise maximum limit")


@pytest.mark.parametrize(
    ("name", "stand_in", "problem"),
    [
        (
            f"{module.__name__}.ProcessPoolExecutor",
            _no_descriptors,
            "OSError: [Errno 24] Too many open files",
        ),
        (
            "concurrent.futures.process._ExecutorManagerThread.start",
            _no_threads,
            "RuntimeError: can't start new thread",
        ),
        (
            f"{module.__name__}._prepare",
            _hard_limit,
            "ValueError: not allowed to raise maximum limit",
        ),
    ],
)
async def test_a_process_that_cannot_be_started_is_tried_again_later(
    name: str,
    stand_in: Any,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    async with aligning("Letters") as word_times:
        with monkeypatch.context() as patch:
            patch.setattr(name, stand_in)
            assert await times_of(word_times, GOOD, SECOND) is None
        assert f"aligner Letters: its process cannot be started: {problem}" in caplog.messages
        assert await times_of(word_times, GOOD, SECOND) == ALIGNED


def test_a_process_whose_gateway_has_ended_ends() -> None:
    """Also if the gateway ended before the process could ask for a signal at its end."""
    child = multiprocessing.get_context("spawn").Process(target=module._end_with, args=(0,))
    child.start()
    child.join()
    assert child.exitcode == 1


async def test_an_answer_that_cannot_be_sent_fails_its_text() -> None:
    async with aligning("Letters") as word_times:
        assert word_times.worker is not None
        with pytest.raises(WorkerError, match=r"its process has failed \(TypeError\)"):
            await word_times.worker.ask(threading.Lock)
        assert await times_of(word_times, GOOD, SECOND) == ALIGNED


async def test_an_aligner_that_is_slow_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    async with aligning("SlowToLoad"):
        await asyncio.sleep(1)  # it still loads when the gateway ends
    monkeypatch.setattr(module, "_LOAD_S", 1.0)
    async with aligning("SlowToLoad") as word_times:
        assert await times_of(word_times, GOOD, SECOND) is None


def test_unknown_aligners_are_refused_at_the_start() -> None:
    with pytest.raises(SettingsError, match=r"^aligner.name: 'nobody' is not one of .*Letters"):
        check_plugin("aligner.name", "nobody", ALIGNERS)
    with pytest.raises(SettingsError, match=r"^aligner.name: missing cannot be imported: Attr"):
        check_plugin("aligner.name", "missing", ALIGNERS)


RUBBISH: list[Any] = [
    ["words"],
    [["a"]],
    [["a", 0.0, 0.1, 0.2]],
    [["", 0.0, 0.1]],
    [[1, 0.0, 0.1]],
    [["z", 0.0, 0.1]],
    [["b", 0.0, 0.1], ["a", 0.1, 0.2]],
    [["a", 0.0, 0.1], ["a", 0.1, 0.2]],
    [["a", "0", 0.1]],
    [["a", True, 1]],
    [["a", float("nan"), 0.1]],
    [["a", 0.0, float("inf")]],
    [["a", 0, 10**400]],
    [["a", -(10**400), 0]],
    [["a", -0.1, 0.1]],
    [["a", 0.2, 0.1]],
    [["a", 0.5, 0.6], ["b", 0.4, 0.7]],
    [["a", 0.0, 1.1]],
]


@pytest.mark.parametrize("words", RUBBISH)
def test_rubbish_is_no_answer(words: Any) -> None:
    with pytest.raises(WorkerError, match=r"^its answer has "):
        checked(words, "a b", 1.0, [])


def test_times_may_exceed_the_audio_by_a_frame() -> None:
    assert checked([["a", 0.0, 0.5], ["b", 0.5, 1.04]], "a b", 1.0, [])[-1] == Word("b", 0.5, 1.0)


@pytest.mark.parametrize(
    "answer",
    ["3", "[(set(), 0, 1)]", "[('b', 0, 10**400)]"],
)
async def test_rubbish_of_a_process_fails_its_text(answer: str) -> None:
    async with aligning("Rubbish") as word_times:
        assert await times_of(word_times, f"bad {answer}", SECOND) is None
        assert await times_of(word_times, GOOD, SECOND) == ALIGNED


# Audio that is sent.


async def sent(
    spoken: SpokenText, *pieces: NDArray[np.int16]
) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]]]:
    for piece in pieces:
        spoken.add(piece)
    return await spoken.rest()


async def test_words_and_segments() -> None:
    segment = {"text": GOOD, "start_ms": 0, "end_ms": 1000}
    async with aligning("Letters", metrics := Metrics(), longest_s=1.5) as word_times:
        stereo = np.zeros((12_000, 2), np.int16)
        words, segments = await sent(SpokenText(word_times, GOOD), SECOND[:12_000], stereo)
        assert words == [
            {"word": word, "start_ms": start, "end_ms": end} for word, start, end in ALIGNED
        ]
        assert segments == [segment]
        words, segments = await sent(SpokenText(word_times, GOOD), SECOND, SECOND)
        assert words is None  # too long
        assert segments == [segment | {"end_ms": 2000}]
        assert await sent(SpokenText(word_times, GOOD)) == ([], [segment | {"end_ms": 0}])
    assert outcomes(metrics) == {"done": 1, "long": 1}
    async with aligning(None) as none:
        assert await sent(spoken := SpokenText(none, GOOD), SECOND) == ([], [segment])
        assert not spoken._pieces


async def test_words_are_known_while_the_audio_arrives() -> None:
    """The aligner tells a letter for each second of audio, at any rate of the audio."""
    rates = (8000, 16_000)
    async with aligning("Follows", metrics := Metrics()) as word_times:
        texts = [SpokenText(word_times, GOOD, rate_hz) for rate_hz in rates]
        for second in range(2):
            word = {"word": GOOD[second], "start_ms": 1000 * second, "end_ms": 1000 * second + 1000}
            for spoken, rate_hz in zip(texts, rates, strict=True):
                spoken.add(np.zeros(rate_hz * 11 // 10, np.int16))
                await spoken.arrival()
                assert spoken.take() == [word]
        for spoken in texts:
            words, _ = await spoken.rest()
            assert words == [{"word": "c", "start_ms": 2000, "end_ms": 2200}]
    assert outcomes(metrics) == {"done": 2}


@pytest.mark.parametrize("outcome", ["given up", "failed", "late"])
async def test_a_text_without_an_end_is_forgotten(
    outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "bad" if outcome == "failed" else GOOD
    async with aligning("Follows", metrics := Metrics(), waiting=1) as word_times:
        spoken, worker = SpokenText(word_times, text, 8000), word_times.worker
        spoken.add(np.zeros(8000, np.int16))
        await spoken.arrival()
        assert worker is not None
        assert spoken._aligning is not None
        if outcome == "given up":
            spoken.close()
        elif outcome == "failed":
            spoken.add(np.zeros(8000, np.int16))
        else:
            hasty = AlignerSettings(name="Follows", timeout_s=0.2)
            async with worker._free:  # functions of other texts
                with monkeypatch.context() as patch:
                    patch.setattr(word_times, "settings", hasty)
                    spoken.add(np.zeros(8000, np.int16))
                    await asyncio.wait({spoken._aligning})
        await asyncio.wait({spoken._aligning})
        await asyncio.gather(*word_times._forgotten)
        with pytest.raises(WorkerError, match="its process was replaced"):  # it knows no such text
            await worker.ask(align, 0, "", SECOND, 8000, False)
        assert await times_of(word_times, GOOD, SECOND) is not None
    assert outcomes(metrics) == {"done": 1} | ({} if outcome == "given up" else {outcome: 1})


async def test_an_aligner_that_takes_a_word_back_fails_its_text() -> None:
    async with aligning("Follows", metrics := Metrics()) as word_times:
        spoken = SpokenText(word_times, "bad", 8000)
        spoken.add(np.zeros(8000, np.int16))
        await spoken.arrival()
        words, _ = await sent(spoken, np.zeros(8000, np.int16))
        assert words is None
    assert outcomes(metrics) == {"failed": 1}
