"""Service of a model, in this process: messages go in, and replies get audio or an error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from testkit.door import Door
from testkit.models.tiny_model import FaultyVocoder, demo_tokens
from testkit.replies import RecordingReply
from token2wav import Token2Wav, Voice
from token2wav.cache.block_pool import OutOfBlocksError
from token2wav.config import LimitConfig, RuntimeConfig, ServerConfig, StreamConfig
from token2wav.errors import IdleError, InputError, LimitError
from token2wav.serving.door.message import Message
from token2wav.serving.observer import Observer


@pytest.fixture
def door(faulty: tuple[Token2Wav, FaultyVocoder]) -> Iterator[Door]:
    with Door.open(faulty[0]) as door:
        yield door


def test_an_error_of_the_reader_refuses_the_message(door: Door) -> None:
    def read() -> Message:
        raise IndexError("list index out of range")

    reply = RecordingReply()
    door.service.take(read, reply)
    assert str(reply.failed()) == "backend: IndexError: list index out of range"
    assert door.refusals.errors == [reply.error]


def test_a_refused_message_is_freed_at_once(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle of its error and its frame would keep its tensors until Python looks for cycles."""
    monkeypatch.setattr(door.service, "_observer", Observer())  # it keeps no errors
    reply = RecordingReply()
    freed = weakref.ref(reply)

    def read() -> Message:
        raise InputError("tokens", "none")

    gc.disable()
    try:
        door.service.take(read, reply)
        assert reply.error is not None
        reply.error = None  # its traceback names the frames
        del reply
        assert freed() is None
    finally:
        gc.enable()


def test_a_full_cache_counts_as_a_refusal(
    door: Door, faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice
) -> None:
    faulty[1].open_fault = OutOfBlocksError("cache: 3 pages needed, 0 of 64 free; try again later")
    assert door.send(demo_tokens(4), voice).failed() is faulty[1].open_fault
    assert door.refusals.errors == [faulty[1].open_fault]


def test_an_utterance_that_ends_while_it_is_opened_frees_its_id(
    door: Door,
    voice: Voice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process that stalls for longer than `limits.idle_seconds` closes streams at that moment."""
    requests = door.service._utterances

    def stalled(*arguments: Any, **options: Any) -> Any:
        request = open_request(*arguments, **options)
        requests.cancel(request, IdleError("stream: no tokens for 30 s, so it was closed"))
        return request

    open_request = requests.open
    with monkeypatch.context() as patched:
        patched.setattr(requests, "open", stalled)
        error = door.refusal(demo_tokens(4), voice, 7, start=True)
    assert error == "stream: no tokens for 30 s, so it was closed"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert door.send(demo_tokens(4), voice, 7, start=True, end=True).succeeded()


def test_a_drain_that_begins_while_a_message_is_read_refuses_it(
    faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice
) -> None:
    """The launcher ends a server that drains as soon as no utterance is counted as open."""
    checks = iter([None, LimitError("server: it is shutting down; try another one")])

    def check() -> None:
        if (error := next(checks)) is not None:
            raise error

    with Door.open(faulty[0], check_admission=check) as door:
        error = door.refusal(demo_tokens(4), voice, 7, start=True, end=True)
        assert error == "server: it is shutting down; try another one"
        assert list(map(str, door.refusals.errors)) == [error]
        assert not door.service._utterances.open_utterances


@pytest.mark.parametrize(
    ("streams", "left_blocks", "fit"),
    [
        (64, -1, 2),
        (2, -1, None),
        (64, 8, 5),
        (64, 1, 10),
        (10, 1, None),
        (64, 0, 13),
        (13, 0, None),
    ],
)
def test_a_warning_of_more_streams_than_pages(
    faulty: tuple[Token2Wav, FaultyVocoder],
    caplog: pytest.LogCaptureFixture,
    streams: int,
    left_blocks: int,
    fit: int | None,
) -> None:
    """A stream of 30 s has 30 blocks, and one that its prompt begins; 65 pages are 64 MiB of the
    tiny model's. With a window, each chunk borrows 5 pages. Up to 16 run at a time, 8 of them in an
    interruption.
    """
    config = ServerConfig(
        limits=LimitConfig(streams=streams),
        stream=StreamConfig(left_blocks=left_blocks),
        runtime=RuntimeConfig(workers=1),
    )
    assert faulty[0].pipeline.flow.usage().capacity == 65
    with Door.open(faulty[0], config):
        pass
    warnings = [
        record.getMessage()
        for record in caplog.records
        if "the cache has pages" in record.getMessage()
    ]
    assert [warning.partition(":")[0] for warning in warnings] == (
        []
        if fit is None
        else [f"the cache has pages for {fit} streams of 30 s, and limits.streams admits {streams}"]
    )


@pytest.mark.parametrize(
    ("most_streams", "batch_streams", "warned"), [(4, 8, True), (4, 4, False), (0, 64, False)]
)
def test_batches_larger_than_the_engine_are_warned_of(
    faulty: tuple[Token2Wav, FaultyVocoder],
    caplog: pytest.LogCaptureFixture,
    most_streams: int,
    batch_streams: int,
    warned: bool,
) -> None:
    summary = replace(faulty[0].summary, name="tensorrt", most_streams=most_streams)
    config = ServerConfig(limits=LimitConfig(streams=1, batch_streams=batch_streams))
    with Door.open(faulty[0], config, summary):
        pass
    expected = "limits.batch_streams is 8, but the tensorrt backend computes at most 4 chunks"
    assert (expected in caplog.text) is warned
