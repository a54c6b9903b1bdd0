"""Scheduler without threads, engines or real time: turns of workers, and replies to end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testkit.models.tiny_model import TINY, demo_tokens, demo_voice, schedule_of
from testkit.replies import FIRST, HOP, LIMITS, FakeClock, RecordingReply, silence
from token2wav import AudioChunk, LimitError, StreamClosedError
from token2wav.config.model_config import ModelConfig
from token2wav.errors import IdleError
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.serving.audio_output import AudioOutput
from token2wav.serving.chunking import Chunker
from token2wav.serving.clocks import Playback
from token2wav.serving.policy import chunks_at_once
from token2wav.serving.scheduler import Scheduler
from token2wav.serving.turn import Turn
from token2wav.serving.utterance import Status, Utterance
from token2wav.stages.stage import DEFAULT_OPTIONS

CONFIG = CosyVoice3Config.read(TINY)
CODEC = replace(CONFIG, stages=("decoder",))
WORKER = 7


class Rig:
    def __init__(self, config: ModelConfig = CONFIG, **limits: float) -> None:
        self.clock = FakeClock()
        self.scheduler = Scheduler(replace(LIMITS, **limits), config)  # type: ignore[arg-type]

    def admitted(self, *, canary: bool = False) -> Utterance:
        voice, playback = demo_voice(25), Playback(self.clock)
        chunker = Chunker(voice.prompt_tokens, CONFIG, schedule_of(CONFIG), playback)
        utterance = Utterance(voice, DEFAULT_OPTIONS, chunker, playback, AudioOutput(CONFIG))
        utterance.canary = canary
        self.scheduler.admit(utterance, self.clock())
        return utterance

    def opened(self) -> Utterance:
        utterance = self.admitted()
        utterance.start(WORKER)
        utterance.release(self.clock())
        return utterance

    def push(
        self, utterance: Utterance, count: int, *, end: bool = False, keep_open: bool = False
    ) -> list[int]:
        """Pushes tokens, and returns the numbers of the messages that the push finishes."""
        reply = RecordingReply(str(len(utterance.messages)))
        finished = self.scheduler.push(
            utterance, demo_tokens(count), reply, self.clock(), end=end, keep_open=keep_open
        )
        return [
            int(finished_reply.name)
            for finished_reply in finished
            if isinstance(finished_reply, RecordingReply)
        ]

    def next_turn(self) -> Turn:
        turn = self.scheduler.next_turn(WORKER, self.clock())
        assert turn is not None
        assert [(utterance.status, utterance.owner) for utterance in turn.utterances] == [
            (Status.RUNNING, WORKER) for _ in turn.utterances
        ]
        return turn

    def finish(self, turn: Turn, result: AudioChunk | None = None, seconds: float = 0.0) -> None:
        """Ends a turn with one result for all utterances."""
        results = [result] * len(turn.utterances)
        for delivery in self.scheduler.finish_turn(turn, results, seconds, self.clock()):
            assert delivery.result is result
        answers = self.scheduler.settle(turn, self.clock(), results)
        while answers:
            answers = self.scheduler.settle(turn, self.clock())
        assert turn not in self.scheduler.turns

    def opens(self, utterance: Utterance) -> Turn:
        """Begins the next turn, which must open an utterance."""
        turn = self.next_turn()
        assert (turn.opens, turn.utterances) == (True, [utterance])
        return turn

    def computes(self, *utterances: Utterance) -> Turn:
        """Begins the next turn, which must compute a batch."""
        turn = self.next_turn()
        assert (turn.opens, turn.utterances) == (False, [*utterances])
        return turn

    def run_chunk(self, utterance: Utterance) -> None:
        """Runs the next chunk of an utterance, which has 1 s of audio."""
        self.finish(self.computes(utterance), silence())


def test_requests_open_in_order_behind_older_chunks() -> None:
    rig = Rig()
    rig.push(debt := rig.admitted(), 0)
    rig.finish(rig.opens(debt), seconds=1.0)
    old, first, second = rig.opened(), rig.admitted(), rig.admitted()
    rig.push(second, 1)
    rig.push(first, 1)
    rig.finish(rig.opens(first))
    rig.push(old, FIRST)
    rig.clock.now += 1
    rig.push(young := rig.admitted(), 1)
    rig.finish(rig.opens(second))
    rig.finish(rig.computes(old), silence())
    rig.opens(young)


def test_openings_take_as_much_time_as_batches_beside_older_chunks() -> None:
    rig = Rig(batch_streams=1)
    rig.push(past := rig.opened(), FIRST)
    rig.finish(rig.computes(past), seconds=9.0)  # batches of the past are no credit
    older, newcomers = [rig.opened() for _ in range(3)], [rig.admitted() for _ in range(4)]
    for utterance in older:
        rig.push(utterance, FIRST)
    rig.clock.now += 1
    for utterance in newcomers:
        utterance.admitted = rig.clock.now
        rig.push(utterance, 1)
    for utterance, seconds in zip(newcomers, (0.01, 0.03, 0.5), strict=False):
        rig.finish(rig.opens(utterance), seconds=seconds)  # short ones do not wait for a batch
    rig.finish(rig.computes(older[0]), seconds=0.4)
    rig.finish(rig.computes(older[1]), seconds=0.2)
    rig.finish(rig.opens(newcomers[3]))
    rig.computes(older[2])


def test_a_canary_is_served_first_and_no_limit_refuses_it() -> None:
    rig = Rig(streams=2)
    old, newcomer = rig.opened(), rig.admitted()
    rig.push(old, FIRST)
    rig.push(newcomer, 1)
    with pytest.raises(LimitError):
        rig.admitted()
    rig.clock.now += 1
    canary = rig.admitted(canary=True)
    rig.push(canary, 3, end=True)
    rig.finish(rig.opens(canary))
    rig.finish(rig.opens(newcomer))
    rig.finish(rig.computes(canary), silence())
    rig.finish(rig.computes(old), silence())
    rig.scheduler.fail(old, LimitError("cache: full"))
    rig.admitted()  # the canary takes no room


def test_a_message_that_arrives_while_replies_end_is_answered_by_the_same_worker() -> None:
    rig = Rig()
    utterance = rig.opened()
    rig.push(utterance, FIRST)
    turn = rig.computes(utterance)
    rig.scheduler.finish_turn(turn, [silence()], 0.1, rig.clock())
    assert len(rig.scheduler.settle(turn, rig.clock(), [silence()])) == 1
    assert rig.push(utterance, 1) == []
    assert (utterance.owner, rig.scheduler.idle_workers) == (WORKER, 0)
    assert len(rig.scheduler.settle(turn, rig.clock())) == 1
    assert rig.scheduler.settle(turn, rig.clock()) == []
    assert (utterance.owner, rig.scheduler.idle_workers) == (None, 1)


@pytest.mark.parametrize("moment", ["result", "record", "release"])
def test_a_defect_of_one_request_ends_no_other(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    rig = Rig()
    failing, other = rig.opened(), rig.opened()
    rig.push(failing, FIRST)
    rig.push(other, FIRST)
    turn, now = rig.computes(failing, other), rig.clock()
    subject, name = {
        "result": (failing.playback, "sent"),
        "record": (failing.chunker, "finish_chunk"),
        "release": (failing.chunker, "needs"),
    }[moment]
    monkeypatch.setattr(subject, name, broken)
    deliveries = rig.scheduler.finish_turn(turn, [silence(), silence()], 0.1, now)
    answers = rig.scheduler.settle(turn, now, [delivery.result for delivery in deliveries])
    assert {
        answer.utterance: (str(answer.error), answer.ended) for answer in reversed(answers)
    } == {
        failing: ("backend: ValueError: a bug", "BackendError"),
        other: ("None", ""),
    }
    assert (failing.status, failing.owner) == (Status.FAILED, None)
    assert rig.scheduler.utterances == [other]
    assert rig.scheduler.settle(turn, now) == []


def test_only_as_many_turns_are_computed_as_there_are_workers() -> None:
    """A sender may only begin when the batch before it is computed."""
    rig = Rig()
    rig.scheduler = Scheduler(LIMITS, CONFIG, workers=1, senders=1)
    first, second = rig.opened(), rig.opened()
    rig.push(first, FIRST)
    turn = rig.computes(first)
    rig.push(second, FIRST)
    assert rig.scheduler.next_turn(WORKER + 1, rig.clock()) is None
    assert not rig.scheduler.has_work
    rig.scheduler.finish_turn(turn, [silence()], 0.1, rig.clock())
    assert rig.scheduler.has_work
    sending = rig.scheduler.next_turn(WORKER + 1, rig.clock())
    assert sending is not None
    assert sending.utterances == [second]
    assert (rig.scheduler.idle_workers, rig.scheduler.has_work) == (0, False)


@pytest.mark.parametrize(("admitted", "chunks"), [(1.0, 2), (2.0, 3), (9.0, 4)])
def test_a_waiting_stream_without_audio_counts_by_its_admission(
    admitted: float, chunks: int
) -> None:
    rig = Rig()
    rig.push(past := rig.opened(), FIRST)
    rig.finish(rig.computes(past), seconds=0.01 * 2 * HOP)
    rig.scheduler.fail(past, StreamClosedError("stream: it was cancelled"))
    ready = [rig.opened() for _ in range(4)]
    for utterance in ready:
        rig.push(utterance, FIRST)
        utterance.playback.sent(4.5)
    rig.admitted().admitted += admitted
    assert rig.next_turn().utterances == ready[:chunks]


def test_a_batch_of_a_decoder_has_chunks_of_one_length() -> None:
    rig = Rig(CODEC)
    utterances = [rig.opened() for _ in range(2)]
    for utterance in utterances:
        rig.push(utterance, FIRST)
        rig.run_chunk(utterance)
    rig.clock.now += 1.0  # the listeners are out of audio, so one block is enough
    for utterance, tokens in zip(utterances, (2 * HOP, HOP), strict=True):
        rig.push(utterance, tokens)
    assert [utterance.chunker.next_tokens for utterance in utterances] == [50, 25]
    turn = rig.computes(*utterances)
    assert [utterance.chunker.next_tokens for utterance in utterances] == [25, 25]
    assert turn.tokens == 50


def test_only_a_request_that_awaits_tokens_is_idle() -> None:
    rig = Rig(idle_seconds=30.0)
    ready, waiting, unopened, empty = rig.opened(), rig.opened(), rig.admitted(), rig.admitted()
    rig.push(ready, FIRST)
    rig.push(waiting, 1)
    rig.push(unopened, 1)
    rig.clock.now += 29
    assert rig.push(waiting, 0) == [0]  # an empty message does not count as activity
    rig.clock.now += 2
    overdue = rig.scheduler.overdue(rig.clock())
    assert [utterance for utterance, _ in overdue] == [waiting, empty]
    assert all(isinstance(error, IdleError) for _, error in overdue)


@pytest.mark.parametrize("result", [None, silence(0)])
def test_a_result_without_audio_does_not_start_playback(result: AudioChunk | None) -> None:
    rig = Rig()
    rig.push(utterance := rig.opened(), FIRST)
    rig.finish(rig.computes(utterance), result)
    assert (utterance.playback.started, utterance.chunker.chunks) == (None, 1)


@pytest.mark.parametrize("keep_open", [True, False])
def test_a_dry_listener_gets_available_audio_if_a_reply_is_open(
    keep_open: bool,
) -> None:
    rig = Rig()
    utterance = rig.opened()
    rig.push(utterance, FIRST, keep_open=keep_open)
    rig.run_chunk(utterance)
    rig.clock.now += 0.1
    rig.push(utterance, 30)  # a block and more, but not the next hop
    assert (utterance.status, len(utterance.messages)) == (Status.WAITING, 0)
    rig.clock.now += 0.85
    turn = rig.scheduler.next_turn(WORKER, rig.clock())
    assert (turn is not None) == keep_open
    assert utterance.chunker.next_tokens == (25 if keep_open else 0)


# Interruptions of a batch between its ODE steps.


def a_busy_rig(
    token_seconds: float = 2e-4, lead_seconds: float = 0.5, interruptions: bool = True
) -> tuple[Rig, Turn]:
    """Returns a rig that computes a batch of 400 tokens for listeners with audio."""
    rig = Rig()
    rig.scheduler._has_interruptions = interruptions
    listeners = [rig.opened() for _ in range(8)]
    for tokens, end in ((FIRST, False), (75, True)):
        for listener in listeners:
            rig.push(listener, tokens, end=end)
        turn = rig.computes(*listeners)
        if not end:
            rig.finish(
                turn, silence(round(24_000 * lead_seconds)), seconds=token_seconds * turn.tokens
            )
    return rig, turn


def interrupting(
    rig: Rig, turn: Turn, spent: float = 0.0, seconds: float | None = None
) -> list[Utterance]:
    """Returns the utterances of an interruption, which ends at once.

    Args:
        seconds: measured time of the interruption; by default the time that its tokens predict.
    """
    if not turn.interruptible:
        return []
    other = rig.scheduler.next_interruption(turn, spent, rig.clock())
    if other is None:
        return []
    assert (other.worker, other.interruptible) == (WORKER, False)
    if seconds is None:
        seconds = other.tokens * rig.scheduler._policy._token_seconds
    rig.finish(other, None if other.opens else silence(), seconds)
    assert not rig.scheduler.can_compute
    return [*other.utterances]


def test_first_chunks_and_openings_interrupt_a_batch() -> None:
    rig, turn = a_busy_rig()
    assert interrupting(rig, turn) == []
    ready, unopened = [rig.opened() for _ in range(9)], rig.admitted()
    for utterance in (*ready, unopened):
        rig.push(utterance, 1, end=True)
    assert interrupting(rig, turn) == ready[:8]
    assert interrupting(rig, turn) == ready[8:]
    assert [interrupting(rig, turn) for _ in range(3)] == [[unopened], [unopened], []]
    rig.finish(turn, silence())
    assert (rig.scheduler.utterances, rig.scheduler.turns) == ([*turn.utterances], set())


def test_interruptions_of_a_batch_have_50_ms() -> None:
    rig, turn = a_busy_rig(1e-3, 5.0)
    ready = [rig.opened() for _ in range(2)]
    for utterance in ready:
        rig.push(utterance, 1, end=True)  # computed with the last block of the prompt: 26 tokens
    rig.push(unopened := rig.admitted(), 1, end=True)  # its prompt has 25 tokens
    assert interrupting(rig, turn, spent=0.0245) == [unopened]
    assert interrupting(rig, turn) == ready[:1]
    assert interrupting(rig, turn, spent=0.026) == []
    assert interrupting(rig, turn) == ready[1:]


def test_an_interruption_takes_at_least_the_mean_time_of_earlier_ones() -> None:
    """Its 26 tokens alone would take 5 ms."""
    rig, turn = a_busy_rig()
    rig.scheduler._policy._most = 1
    ready = [rig.opened() for _ in range(3)]
    for utterance in ready:
        rig.push(utterance, 1, end=True)
    assert interrupting(rig, turn, spent=0.026) == [], "nothing was measured yet"
    assert interrupting(rig, turn, spent=0.024, seconds=0.02) == ready[:1]
    assert interrupting(rig, turn, spent=0.031) == []
    assert interrupting(rig, turn, spent=0.0299, seconds=0.5) == ready[1:2]
    # After one that took too long, a batch may still be interrupted.
    assert interrupting(rig, turn, spent=0.026) == []
    assert interrupting(rig, turn) == ready[2:]


@pytest.mark.parametrize(("batches", "opens"), [(0, True), (2, True), (3, False)])
def test_an_opening_takes_the_time_of_the_batches_of_its_prompt(batches: int, opens: bool) -> None:
    rig, turn = a_busy_rig()
    rig.scheduler._prompt_batches = lambda utterance: batches
    rig.scheduler._policy.record_interruption(0.02)
    rig.push(unopened := rig.admitted(), 1, end=True)
    assert interrupting(rig, turn) == ([unopened] if opens else [])


def test_interruptions_do_not_change_the_mean_time_of_a_token() -> None:
    rig, turn = a_busy_rig()
    rig.push(utterance := rig.opened(), 1, end=True)
    assert interrupting(rig, turn, seconds=0.04) == [utterance]
    assert rig.scheduler._policy._token_seconds == pytest.approx(2e-4)


def test_a_longer_first_chunk_does_not_hold_up_a_shorter_one() -> None:
    rig, turn = a_busy_rig(1.2e-3, 5.0)
    longer, shorter = rig.opened(), rig.opened()
    rig.push(longer, 60, end=True)
    rig.push(shorter, 1, end=True)
    assert interrupting(rig, turn) == [shorter]


@pytest.mark.parametrize(("left", "waits"), [(0.12, True), (0.14, False), (-0.01, False)])
def test_a_listener_that_waits_for_the_next_batch_is_not_delayed(left: float, waits: bool) -> None:
    """The batch takes 80 ms, and its interruptions up to 50 ms."""
    rig, turn = a_busy_rig()
    rig.push(listener := rig.opened(), 1, end=True)
    listener.chunker.chunks = 1
    listener.playback.plays_until = rig.clock() + left
    rig.push(newcomer := rig.opened(), 1, end=True)
    assert interrupting(rig, turn) == ([] if waits else [newcomer])


@pytest.mark.parametrize(
    ("workers", "config", "chunks"), [(1, CONFIG, 8), (2, CONFIG, 0), (1, CODEC, 0)]
)
def test_only_a_flow_with_one_worker_has_interruptions(
    workers: int, config: ModelConfig, chunks: int
) -> None:
    assert chunks_at_once(config, 64, workers) == 64 * workers + chunks
    assert chunks_at_once(config, 2, workers) == 2 * workers + min(chunks, 2)
    scheduler = Scheduler(LIMITS, config, workers)
    rig, turn = a_busy_rig(interruptions=scheduler._has_interruptions)
    rig.push(utterance := rig.opened(), 1, end=True)
    assert interrupting(rig, turn) == ([utterance] if chunks else [])


@pytest.mark.parametrize(
    ("token_seconds", "lead_seconds", "waits"),
    [(2e-4, 0.14, False), (2e-4, 0.12, True), (1.2e-4, 0.5, True)],
    ids=["in time", "a listener would wait", "a short batch"],
)
def test_a_batch_that_no_chunk_may_interrupt(
    token_seconds: float, lead_seconds: float, waits: bool
) -> None:
    """A batch of 80 ms and 50 ms of interruptions must end before its listeners need the audio."""
    rig, turn = a_busy_rig(token_seconds, lead_seconds)
    rig.push(utterance := rig.opened(), 1, end=True)
    assert interrupting(rig, turn) == ([] if waits else [utterance])


def test_only_first_chunks_interrupt_and_only_a_batch_that_was_heard() -> None:
    rig, turn = a_busy_rig()
    rig.push(utterance := rig.opened(), 1, end=True)
    utterance.chunker.chunks = 1  # of silence, which was trimmed
    rig.push(rig.admitted(canary=True), 1)
    assert interrupting(rig, turn) == []
    utterance.chunker.chunks = 0
    turn.utterances[0].playback.plays_until = None
    assert interrupting(rig, turn) == []
    rig.scheduler.fail(turn.utterances[0], StreamClosedError("stream: it was cancelled"))
    assert interrupting(rig, turn) == [utterance]
