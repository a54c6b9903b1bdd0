"""Service of a model, in this process: messages go in, and replies get audio or an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from testkit.models.tiny_model import FaultyVocoder, demo_tokens
from testkit.replies import Expected, RecordingReply
from token2wav import Token2Wav, Voice
from token2wav.cache.block_pool import OutOfBlocksError
from token2wav.config import LimitConfig, RuntimeConfig, ServerConfig, StreamConfig
from token2wav.errors import IdleError, LimitError, Token2WavError
from token2wav.serving.door.message import Message, Parameters
from token2wav.serving.door.sequences import Owner
from token2wav.serving.door.service import Service
from token2wav.serving.request_pool import Observer
from token2wav.stages.stage import StageSummary
from token2wav.voice import FIELDS


class Refusals(Observer):
    def __init__(self) -> None:
        self.errors: list[Token2WavError] = []

    def refused(self, error: Token2WavError) -> None:
        self.errors.append(error)


def serving(
    model: Token2Wav,
    config: ServerConfig | None = None,
    backend: StageSummary | None = None,
    **options: Any,
) -> Service:
    return Service(
        model.pipeline, backend or model.backend, config or ServerConfig(), Refusals(), **options
    )


@pytest.fixture
def service(faulty: tuple[Token2Wav, FaultyVocoder]) -> Iterator[Service]:
    made = serving(faulty[0])
    yield made
    made.close()


def first(
    voice: Voice, sequence_id: int = 0, *, end: bool = True, parameters: Parameters | None = None
) -> Message:
    """Returns the first message of an utterance, or a whole one."""
    inputs = {name: getattr(voice, name) for name in FIELDS}
    owner = Owner.of(parameters or {})
    return Message(sequence_id, True, end, owner, parameters or {}, demo_tokens(4), inputs)


def answered(service: Service, message: Message) -> RecordingReply:
    reply = RecordingReply()
    service.take(lambda: message, reply)
    return reply


def test_the_audio_is_that_of_the_library(
    service: Service, voice: Voice, expected: Expected
) -> None:
    [chunk] = answered(service, first(voice)).succeeded()
    assert chunk.final
    assert (chunk.audio == expected(4)).all()


def test_a_message_continues_the_utterance_of_its_id(service: Service, voice: Voice) -> None:
    opened = answered(service, first(voice, 7, end=False))
    rest = Message(7, False, True, Owner(), {}, demo_tokens(4), {})
    assert sum(chunk.token_count for chunk in answered(service, rest).succeeded()) == 8
    assert opened.succeeded() == []


def test_an_error_of_the_reader_refuses_the_message(service: Service) -> None:
    def read() -> Message:
        raise IndexError("list index out of range")

    reply = RecordingReply()
    service.take(read, reply)
    assert str(reply.failed()) == "backend: IndexError: list index out of range"
    assert service._observer.errors == [reply.error]  # type: ignore[attr-defined]


def test_a_full_cache_counts_as_a_refusal(
    service: Service, faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice
) -> None:
    faulty[1].open_fault = OutOfBlocksError("cache: 3 pages needed, 0 of 64 free; try again later")
    assert answered(service, first(voice)).failed() is faulty[1].open_fault
    assert service._observer.errors == [faulty[1].open_fault]  # type: ignore[attr-defined]


def test_no_utterance_starts_while_the_server_drains(
    faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice
) -> None:
    refusals: list[LimitError] = []

    def check_admission() -> None:
        if refusals:
            raise refusals[0]

    service = serving(faulty[0], check_admission=check_admission)
    try:
        opened = answered(service, first(voice, 7, end=False))
        refusals.append(LimitError("server: it is shutting down; try another one"))
        assert answered(service, first(voice, 8)).failed() is refusals[0]
        rest = Message(7, False, True, Owner(), {}, demo_tokens(4), {})
        assert answered(service, rest).succeeded()
        assert opened.succeeded() == []
    finally:
        service.close()


def test_an_utterance_that_ends_while_it_is_opened_frees_its_id(
    service: Service,
    voice: Voice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process that stalls for longer than `limits.idle_seconds` closes streams at that moment."""
    requests = service._requests

    def stalled(*arguments: Any, **options: Any) -> Any:
        request = open_request(*arguments, **options)
        requests.cancel(request, IdleError("stream: no tokens for 30 s, so it was closed"))
        return request

    open_request = requests.open
    with monkeypatch.context() as patched:
        patched.setattr(requests, "open", stalled)
        error = answered(service, first(voice, 7, end=False)).failed()
    assert str(error) == "stream: no tokens for 30 s, so it was closed"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert answered(service, first(voice, 7)).succeeded()


@pytest.mark.parametrize(
    ("streams", "left_blocks", "fit"),
    [(64, -1, 2), (2, -1, None), (64, 8, 5), (64, 1, 25), (25, 1, None), (64, 0, None)],
)
def test_a_warning_of_more_streams_than_pages(
    faulty: tuple[Token2Wav, FaultyVocoder],
    caplog: pytest.LogCaptureFixture,
    streams: int,
    left_blocks: int,
    fit: int | None,
) -> None:
    """A stream of 30 s has 30 blocks, and one that its prompt begins; 65 pages are 64 MiB of the
    tiny model's. With a window, 8 chunks at a time borrow 5 pages each.
    """
    config = ServerConfig(
        limits=LimitConfig(streams=streams),
        stream=StreamConfig(left_blocks=left_blocks),
        runtime=RuntimeConfig(workers=1),
    )
    assert faulty[0].pipeline.flow.usage().capacity == 65
    serving(faulty[0], config).close()
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
    backend = replace(faulty[0].backend, name="tensorrt", most_streams=most_streams)
    config = ServerConfig(limits=LimitConfig(streams=1, batch_streams=batch_streams))
    serving(faulty[0], config, backend).close()
    expected = "limits.batch_streams is 8, but the tensorrt backend computes at most 4 chunks"
    assert (expected in caplog.text) is warned
