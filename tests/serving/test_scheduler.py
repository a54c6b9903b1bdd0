"""Scheduler without threads, engines or real time: ready chunks, their workers, and replies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from testkit.models.tiny_model import TINY, demo_tokens, demo_voice, schedule_of
from testkit.replies import FIRST, HOP, LIMITS, SECOND, FakeClock, RecordingReply
from token2wav import LimitError, StreamClosedError
from token2wav.config.model_config import ModelConfig
from token2wav.errors import IdleError
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.serving.audio_output import AudioOutput
from token2wav.serving.chunking import Chunker
from token2wav.serving.clocks import Playback
from token2wav.serving.request import Request, Status
from token2wav.serving.scheduler import Scheduler
from token2wav.stages.stage import DEFAULT_OPTIONS

CONFIG = CosyVoice3Config.read(TINY)
WORKER = 7


class Rig:
    def __init__(self, config: ModelConfig = CONFIG, **limits: float) -> None:
        self.clock = FakeClock()
        self.scheduler = Scheduler(replace(LIMITS, **limits), config, self.clock)  # type: ignore[arg-type]

    def admitted(self, *, canary: bool = False) -> Request:
        voice, playback = demo_voice(25), Playback(self.clock)
        chunker = Chunker(voice.prompt_tokens, CONFIG, schedule_of(CONFIG), playback)
        request = Request(voice, DEFAULT_OPTIONS, chunker, playback, AudioOutput(CONFIG))
        request.canary = canary
        self.scheduler.admit(request)
        return request

    def opened(self) -> Request:
        request = self.admitted()
        request.start(WORKER)
        request.release(self.clock())
        return request

    def push(
        self, request: Request, count: int, *, end: bool = False, keep_open: bool = False
    ) -> list[int]:
        """Pushes tokens, and returns the numbers of the messages that the push finishes."""
        reply = RecordingReply(str(len(request.messages)))
        finished = self.scheduler.push(
            request, demo_tokens(count), reply, end=end, keep_open=keep_open
        )
        return [
            int(finished_reply.name)
            for finished_reply in finished
            if isinstance(finished_reply, RecordingReply)
        ]

    def run_chunk(self, request: Request) -> int:
        """Runs the next chunk of a request, and returns the number of replies that it finishes."""
        assert self.scheduler.next_batch(WORKER, 1) == [request]
        assert (request.status, request.owner) == (Status.RUNNING, WORKER)
        request.chunker.finish_chunk()
        finished = self.scheduler.finish_consumed_messages(request)
        self.scheduler.release(request)
        return len(finished)


def test_a_request_waits_is_ready_runs_and_is_finished() -> None:
    rig = Rig()
    request = rig.admitted()
    assert request.status is Status.UNOPENED
    assert rig.push(request, 0) == []
    assert rig.scheduler.next_to_open(WORKER) is request
    assert (request.status, request.owner) == (Status.RUNNING, WORKER)
    assert len(rig.scheduler.finish_consumed_messages(request)) == 1
    rig.scheduler.release(request)
    seen = [request.status]
    assert rig.push(request, FIRST - 1) == [0]  # consumed: the tokens complete no chunk
    seen.append(request.status)
    assert rig.push(request, 1) == []
    seen.append(request.status)
    assert rig.push(request, SECOND - FIRST) == []  # waits for the chunk of an earlier message
    for _ in range(2):
        assert rig.run_chunk(request) == 1
        seen.append(request.status)
    assert rig.push(request, 0, end=True) == []
    assert rig.run_chunk(request) == 1
    seen.append(request.status)
    ready, waiting = Status.READY, Status.WAITING
    assert seen == [waiting, waiting, ready, ready, waiting, Status.FINISHED]
    assert rig.scheduler.requests == []
    with pytest.raises(StreamClosedError):
        rig.push(request, 1)


def test_requests_open_in_order_behind_older_chunks() -> None:
    rig = Rig()
    rig.scheduler.record_opening(1.0)
    old, first, second = rig.opened(), rig.admitted(), rig.admitted()
    rig.push(second, 1)
    rig.push(first, 1)
    assert rig.scheduler.next_to_open(WORKER) is first
    rig.push(old, FIRST)
    rig.clock.now += 1
    rig.push(young := rig.admitted(), 1)
    assert rig.scheduler.next_to_open(WORKER) is second
    assert rig.scheduler.next_to_open(WORKER) is None
    assert rig.scheduler.next_batch(WORKER, 1) == [old]
    assert rig.scheduler.next_to_open(WORKER) is young


def test_openings_take_as_much_time_as_batches_beside_older_chunks() -> None:
    rig = Rig()
    rig.scheduler.record_batch(100, 9.0)  # batches of the past are no credit
    old, *newcomers = rig.opened(), *(rig.admitted() for _ in range(4))
    rig.push(old, FIRST)
    rig.clock.now += 1
    for request in newcomers:
        request.admitted = rig.clock.now
        rig.push(request, 1)
    selected = []
    for seconds in (0.01, 0.03, 0.5):  # short openings do not wait for a batch
        selected.append(rig.scheduler.next_to_open(WORKER))
        rig.scheduler.record_opening(seconds)
    assert selected == newcomers[:3]
    assert rig.scheduler.next_to_open(WORKER) is None
    rig.scheduler.record_batch(100, 0.4)
    assert rig.scheduler.next_to_open(WORKER) is None
    rig.scheduler.record_batch(100, 0.2)
    assert rig.scheduler.next_to_open(WORKER) is newcomers[3]


def test_a_canary_is_served_first_and_no_limit_refuses_it() -> None:
    rig = Rig(streams=2)
    old, newcomer = rig.opened(), rig.admitted()
    rig.push(old, FIRST)
    rig.push(newcomer, 1)
    rig.scheduler.record_opening(1.0)
    with pytest.raises(LimitError):
        rig.admitted()
    rig.clock.now += 1
    canary = rig.admitted(canary=True)
    rig.push(canary, 3, end=True)
    assert rig.scheduler.next_to_open(WORKER) is canary
    rig.scheduler.release(canary)
    assert rig.scheduler.next_to_open(WORKER) is newcomer
    assert rig.scheduler.next_batch(WORKER, 1) == [canary]
    assert rig.scheduler.next_batch(WORKER, 1) == [old]
    rig.scheduler.fail(old, LimitError("cache: full"))
    rig.admitted()  # the canary takes no room


def test_a_message_stays_until_its_request_is_open() -> None:
    rig = Rig()
    request = rig.admitted()
    assert rig.push(request, 1) == []
    assert request.status is Status.UNOPENED
    assert len(rig.scheduler.fail(request, LimitError("cache: full"))) == 1
    assert (request.status, request.why_closed) == (Status.FAILED, "stream: it failed: cache: full")
    assert rig.scheduler.fail(request, LimitError("again")) == []


def test_requests_during_a_computation_are_answered() -> None:
    rig = Rig()
    request = rig.opened()
    rig.push(request, FIRST)
    assert rig.scheduler.next_batch(WORKER, 1) == [request]
    assert rig.push(request, 1) == []
    request.chunker.finish_chunk()
    assert len(rig.scheduler.finish_consumed_messages(request)) == 2


def test_a_batch_of_a_decoder_has_chunks_of_one_length() -> None:
    rig = Rig(replace(CONFIG, stages=("decoder",)))
    requests = [rig.opened() for _ in range(2)]
    for request in requests:
        rig.push(request, FIRST)
        rig.run_chunk(request)
        request.playback.sent(0.0)  # the listener is out of audio, so one block is enough
    for request, tokens in zip(requests, (2 * HOP, HOP), strict=True):
        rig.push(request, tokens)
    assert [request.next_tokens for request in requests] == [50, 25]
    assert rig.scheduler.next_batch(WORKER, 1) == requests
    assert [request.next_tokens for request in requests] == [25, 25]


def test_only_a_request_that_awaits_tokens_is_idle() -> None:
    rig = Rig(idle_seconds=30.0)
    ready, waiting, unopened, empty = rig.opened(), rig.opened(), rig.admitted(), rig.admitted()
    rig.push(ready, FIRST)
    rig.push(waiting, 1)
    rig.push(unopened, 1)
    rig.clock.now += 29
    assert rig.push(waiting, 0) == [0]  # an empty message does not count as activity
    rig.clock.now += 2
    overdue = rig.scheduler.overdue()
    assert [request for request, _ in overdue] == [waiting, empty]
    assert all(isinstance(error, IdleError) for _, error in overdue)


@pytest.mark.parametrize("keep_open", [True, False])
def test_a_dry_listener_gets_available_audio_if_a_reply_is_open(
    keep_open: bool,
) -> None:
    rig = Rig()
    request = rig.opened()
    rig.push(request, FIRST, keep_open=keep_open)
    request.playback.sent(1.0)
    rig.run_chunk(request)
    rig.clock.now += 0.1
    rig.push(request, 30)  # a block and more, but not the next hop
    assert (request.status, len(request.messages)) == (Status.WAITING, 0)
    rig.clock.now += 0.85
    rig.scheduler.recheck_waiting()
    assert request.status is (Status.READY if keep_open else Status.WAITING)
    assert request.chunker.next_tokens == (25 if keep_open else 0)


def test_kept_replies_are_finished_with_their_request_each_once() -> None:
    rig = Rig()
    request = rig.opened()
    assert rig.push(request, 1, keep_open=True) == []
    assert len(request.messages) == 0
    assert rig.push(request, 1, end=True, keep_open=True) == []
    assert rig.run_chunk(request) == 2
    assert np.array_equal([request.chunker.new_tokens, request.chunker.chunks], [2, 1])
