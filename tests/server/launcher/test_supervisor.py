"""Decisions of the supervisor, with a scripted server.

tests/served/test_faults_restart.py has real servers.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import Future

import pytest

from testkit.patience import PATIENCE_SECONDS
from token2wav_server import PortInUseError, ServerError, ServerStartError, TritonServer
from token2wav_server.launcher.http_ports import Status
from token2wav_server.launcher.supervisor import Canary, Problem, Supervisor


class Script(TritonServer):
    """Server that follows a script: every call takes the next step of its kind.

    A step that is an exception is raised; any other step is returned. A server with steps of its
    engine has one.
    """

    def __init__(
        self,
        *,
        starts: Iterable[object] = (),
        waits: Iterable[object] = (),
        drains: Iterable[object] = (),
        memory: Iterable[object] = (),
        batches: Iterable[int] = (),
        engine: Iterable[object] | None = None,
        engine_failures: Iterable[str] = (),
    ) -> None:
        super().__init__(".")
        self._batches, self._failures = iter(batches), iter(engine_failures)
        self._has_engine = engine is not None
        scripts = {"start": starts, "wait": waits, "drain": drains, "memory": memory}
        scripts["engine"] = engine or ()
        self._steps = {call: iter(steps) for call, steps in scripts.items()}
        self.calls: list[str] = []
        self.up = False

    @property
    def running(self) -> bool:
        return self.up

    def start(self) -> None:
        self._next("start")
        self.up = True

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self._next("wait")

    @property
    def engine_pid(self) -> int:
        return int(self._has_engine)

    def restart_engine(self) -> None:
        self._next("engine")

    def engine_failure(self) -> str:
        return next(self._failures, "")

    def memory_mib(self) -> int:
        return self._next("memory") or 0

    def drain(self, grace_s: float) -> int:
        return self._next(f"drain {grace_s:g}") or 0

    def failure_reason(self) -> str:
        return "no reason"

    def batches(self) -> int:
        return next(self._batches, 0)

    def stop(self, *, at_once: bool = False) -> None:
        if self.up:
            self.calls.append("stop at once" if at_once else "stop")
        self.up = False

    def _next(self, call: str) -> int | None:
        self.calls.append(call)
        step = next(self._steps[call.split()[0]], None)
        if isinstance(step, BaseException):
            raise step
        assert step is None or isinstance(step, int)
        return step


class Answers(Canary):
    """Canary with given answers: "" for a success, a time-out, or an error that ends with !."""

    reads = 0  # of the certificates

    def __init__(self, *answers: str) -> None:
        super().__init__(1.0, 1.0, ["token2wav"])
        self._answers = iter(answers)

    def start(self, grpc_url: str) -> Future[Problem | None]:
        outcome, answer = Future[Problem | None](), next(self._answers)
        sentence = answer.rstrip("!")
        outcome.set_result(Problem(sentence, silent=sentence == answer) if answer else None)
        return outcome

    def read_certificates(self) -> None:
        self.reads += 1


def serve(
    server: TritonServer,
    *,
    canary: Canary | None = None,
    times: Iterable[float] = (),
    pauses: list[float] | None = None,
) -> tuple[int, list[str]]:
    """Serves, with a clock that is read when a server is ready and when it has failed; all at once
    without times.
    """
    log: list[str] = []
    clock, slept = iter(times), [] if pauses is None else pauses
    supervisor = Supervisor(
        server, canary, 30.0, log.append, clock=lambda: next(clock, 0.0), sleep=slept.append
    )
    return supervisor.serve(), [line for line in log if not line.startswith("ready, ")]


INTERRUPT = KeyboardInterrupt()


@pytest.mark.parametrize(
    ("starts", "drains", "lost", "calls"),
    [
        ([], [], 0, "start, wait, wait, drain 30, stop"),
        ([], [3], 3, "start, wait, wait, drain 30, stop at once"),
        # a second interrupt ends the drain
        ([], [INTERRUPT, 2], 2, "start, wait, wait, drain 30, drain 0, stop at once"),
        ([INTERRUPT], [], 0, "start"),
    ],
)
def test_an_interrupt_ends_the_server_after_a_drain(
    starts: list[object], drains: list[object], lost: int, calls: str
) -> None:
    """The result is the number of streams that were cut off."""
    server = Script(starts=starts, waits=[None, INTERRUPT], drains=drains)
    draining = ["draining: new streams are refused, and open streams have 30 s"]
    assert serve(server) == (lost, [] if starts else draining)
    assert ", ".join(server.calls) == calls


def test_a_signal_stops_it_even_if_its_exception_is_dropped() -> None:
    server, answers = Script(), iter([False, False, False, True])
    supervisor = Supervisor(server, None, 0.0, print, interrupted=lambda: next(answers))
    assert supervisor.serve() == 0
    assert server.calls == ["start", "wait", "wait", "drain 0", "stop"]


def test_a_server_that_cannot_start_is_not_tried_again() -> None:
    server = Script(starts=[PortInUseError("taken")])
    with pytest.raises(PortInUseError):
        serve(server)
    assert server.calls == ["start"]


def test_endless_restarts_of_servers_that_spoke_before() -> None:
    """One client that can crash a server must not end it for all."""
    server = Script(waits=[None, 139] * 20 + [KeyboardInterrupt()])
    _, log = serve(server, canary=Answers(*[""] * 20))
    assert [line.partition("; ")[0] for line in log[:20]] == [
        "the server ended by itself (status 139): no reason"
    ] * 20


def test_restarts_in_a_row_pause_longer_and_longer() -> None:
    """A server that ends as soon as it is ready must not be started without a break."""
    server, pauses = Script(waits=[None, 139] * 9 + [KeyboardInterrupt()]), list[float]()
    lasted = [0, 1, 59, 0, 0, 0, 0, 60, 0]
    times = [time for seconds in lasted for time in (1000.0, 1000.0 + seconds)]
    _, log = serve(server, times=times, pauses=pauses)
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 0, 1]
    assert [line.partition("; ")[2] for line in log[:2]] == [
        "restarting the server",
        "restarting the server in 1 s",
    ]


@pytest.mark.parametrize(
    ("waits", "answers", "failure"),
    [
        ([139], [], r"^the server ended by itself \(status 139\): no reason$"),
        ([None, 139], ["it is silent"], r"^the server ended by itself \(status 139\): no reason$"),
        (
            [None, None],
            ["it is silent", "it is still silent"],
            "^the model does not work: it is still silent$",
        ),
    ],
)
def test_a_server_that_never_spoke_is_given_up(
    waits: list[object], answers: list[str], failure: str
) -> None:
    server = Script(waits=waits)
    with pytest.raises(ServerError, match=failure):
        serve(server, canary=Answers(*answers))
    assert server.calls == ["start", *["wait"] * len(waits), "stop"]


def test_a_server_that_works_no_more_is_restarted() -> None:
    """The canary needs two failures in a row."""
    server = Script(waits=[None] * 7 + [KeyboardInterrupt()])
    canary = Answers("first", "", "second", "", "third", "fourth", "")
    _, log = serve(server, canary=canary)
    assert log[0] == "the model does not work: fourth; restarting the server"
    assert server.calls[:9] == ["start", *["wait"] * 6, "stop at once", "start"]
    assert canary.reads == 1 + server.calls.count("start")


KILLED = "the engine was killed by signal SIGKILL"


def test_an_engine_that_ends_is_restarted_alone() -> None:
    server = Script(
        waits=[None] * 4 + [KeyboardInterrupt()], engine=[], engine_failures=["", KILLED]
    )
    statuses: list[Status] = []
    log: list[str] = []
    supervisor = Supervisor(server, None, 30.0, log.append, statuses.append, sleep=lambda _: None)
    assert supervisor.serve() == 0
    assert log[1] == f"{KILLED}; restarting the engine"
    assert log[2].startswith("ready again with a new engine, ")
    assert statuses[:3] == [Status.READY, Status.STARTING, Status.READY]
    assert server.calls == [
        "start",
        "wait",
        "wait",
        "engine",
        "wait",
        "wait",
        "wait",
        "drain 30",
        "stop",
    ]


@pytest.mark.parametrize(
    ("restart", "answers", "reason"),
    [
        (ServerStartError("no GPU"), [""], "no GPU"),
        (None, ["a", "b", ""], "the model does not work: b"),
    ],
)
def test_a_new_engine_that_does_not_work_either_costs_the_server(
    restart: Exception | None, answers: list[str], reason: str
) -> None:
    """The fault may be in the front, or in Triton."""
    server = Script(
        waits=[None] * (2 + len(answers)) + [KeyboardInterrupt()],
        engine=[restart],
        engine_failures=["", KILLED],
    )
    _, log = serve(server, canary=Answers("", *answers))
    assert log[:2] == [
        f"{KILLED}; restarting the engine",
        f"{reason}; restarting the server in 1 s",
    ]
    assert server.calls.count("start") == 2
    assert server.calls.count("engine") == 1


BUSY = "the canary is slow: {}; the model works, because it has computed {} batches meanwhile, so "
BROKEN = "the model does not work: b; restarting the server"


@pytest.mark.parametrize(
    ("answers", "batches", "outcomes"),
    [
        # batches before each canary that follows no failure, and after each time-out
        (["a", "b", ""], [5, 7, 8, 11, 11], [BUSY.format("a", 2), BUSY.format("b", 3)]),
        (["a", "b"], [5, 5, 5], [BROKEN]),
        # a batch between two canaries counts
        (["a", "b", ""], [5, 5, 6], [BUSY.format("b", 1)]),
        (["a", "b", ""], [5, 6, 6, 6], [BUSY.format("a", 1)]),
        # an answer that is an error does not come from a busy server
        (["a!", "b!"], [5, 6, 7], [BROKEN]),
    ],
)
def test_a_canary_fails_only_if_no_batch_finishes(
    answers: list[str], batches: list[int], outcomes: list[str]
) -> None:
    waits: list[object] = [None] * (len(answers) + 1)
    restarts = outcomes == [BROKEN]
    server = Script(waits=[*waits, *[None] * restarts, KeyboardInterrupt()], batches=[0, *batches])
    _, log = serve(server, canary=Answers("", *answers, ""))
    assert [line[: len(outcome)] for line, outcome in zip(log, outcomes, strict=False)] == outcomes
    assert [line for line in log[len(outcomes) :] if not line.startswith("draining")] == []


def test_a_server_that_ends_during_a_canary_is_noticed_at_once() -> None:
    class Endless(Answers):
        def start(self, grpc_url: str) -> Future[Problem | None]:
            return Future() if self._started else super().start(grpc_url)

        _started = False

        def cancel(self) -> None:
            self._started = not self._started

    server = Script(waits=[None, None, 137, None, KeyboardInterrupt()])
    _, log = serve(server, canary=Endless("", ""))
    assert log[0].startswith("the server ended by itself (status 137)")


def test_the_status_port_is_up_to_date_when_a_line_is_written() -> None:
    statuses, seen = [Status.STARTING], list[tuple[str, Status]]()
    supervisor = Supervisor(
        Script(waits=[None, KeyboardInterrupt()]),
        None,
        30.0,
        lambda line: seen.append((line.split()[0], statuses[-1])),
        statuses.append,
    )
    assert supervisor.serve() == 0
    assert seen == [("ready,", Status.READY), ("draining:", Status.DRAINING)]


def test_a_server_of_too_much_memory_is_drained_and_restarted() -> None:
    server = Script(
        waits=[None] * 4 + [KeyboardInterrupt()], memory=[900, 1000, 1001, 900], drains=[2, 0]
    )
    log: list[str] = []
    statuses: list[Status] = []
    supervisor = Supervisor(
        server, None, 30.0, log.append, statuses.append, memory_mib=1000, sleep=lambda _: None
    )
    assert supervisor.serve() == 0
    excess = "the server takes 1001 MiB of memory, more than --memory-mib=1000"
    assert [line for line in log if not line.startswith("ready, ")] == [
        f"{excess}; draining: new streams are refused, and open streams have 30 s",
        f"{excess}; streams that were cut off: 2; restarting the server",
        "draining: new streams are refused, and open streams have 30 s",
    ]
    assert statuses == [
        Status.READY,
        Status.DRAINING,
        Status.STARTING,
        Status.READY,
        Status.DRAINING,
    ]
    once = ["start", "wait", "memory"]
    assert server.calls == [
        *[*once, "wait", "memory", "wait", "memory", "drain 30", "stop at once"],
        *[*once, "wait", "drain 30", "stop"],
    ]


@pytest.mark.parametrize(
    ("error", "silent"),
    [
        ("ServerError", False),
        ("ModelNotReadyError", False),
        ("ServerUnavailable", True),
        ("ResponseTimeoutError", True),
    ],
)
def test_the_canary_reports_the_error(
    error: str, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import token2wav_client

    def health(self: token2wav_client.Client, **options: object) -> None:
        raise getattr(token2wav_client, error)("no voice")

    monkeypatch.setattr(token2wav_client.Client, "health", health)
    canary = Canary(1.0, 1.0, ["token2wav"])
    assert canary.start("localhost:1").result() == Problem("no voice", silent)


def test_the_canary_leaves_the_main_thread_free_for_signals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from token2wav_client import Client

    threads = list[threading.Thread]()

    def health(self: Client, **options: object) -> None:
        threads.append(threading.current_thread())
        os.kill(os.getpid(), signal.SIGINT)  # raises KeyboardInterrupt in the main thread
        released.wait(PATIENCE_SECONDS)

    released = threading.Event()
    monkeypatch.setattr(Client, "health", health)
    # A shell ignores SIGINT in the commands that it starts in the background.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Canary(1.0, 1.0, ["token2wav"]).start("localhost:1").result()
    finally:
        signal.signal(signal.SIGINT, usual)
    released.set()
    [thread] = threads
    assert thread is not threading.main_thread()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
