"""The supervisor's decisions, with a server that only pretends. Real ones: tests/server/test_faults_restart.py."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from token2wav_server import PortInUseError, ServerError, TritonServer
from token2wav_server.launcher.canary import Canary
from token2wav_server.launcher.errors import ServerGaveUpError
from token2wav_server.launcher.supervisor import BackOff, Supervisor


class Script(TritonServer):
    """Does what it is told, one step for every call; an exception is raised, anything else returned."""

    def __init__(self, *, starts: Iterable[object] = (), waits: Iterable[object] = (), drains: Iterable[object] = ()):
        super().__init__(".")
        self._steps = {"start": iter(starts), "wait": iter(waits), "drain": iter(drains)}
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

    def drain(self, grace_s: float) -> int:
        return self._next(f"drain {grace_s:g}") or 0

    def failure_reason(self) -> str:
        return "no reason"

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
    def __init__(self, *answers: str, failures: int = 0) -> None:
        super().__init__(1.0, Path())
        self._answers = iter(answers)
        self.failures = failures

    def failure(self, grpc_url: str) -> str:
        return next(self._answers)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


def serve(server: TritonServer, *, restarts: int = 2, canary: Canary | None = None) -> tuple[int, list[str]]:
    said: list[str] = []
    supervisor = Supervisor(
        server, back_off=BackOff(restarts), canary=canary, grace_s=30.0, announce=lambda line: said.append(line)
    )
    return supervisor.serve(), [line for line in said if not line.startswith("ready, ")]


def test_stops_in_good_order() -> None:
    server = Script(waits=[KeyboardInterrupt()])
    assert serve(server) == (0, ["draining: new streams are refused, open ones have 30 s"])
    assert server.calls == ["start", "wait", "drain 30", "stop"]


def test_streams_that_outlive_the_grace_time_are_counted_and_cut_off() -> None:
    server = Script(waits=[KeyboardInterrupt()], drains=[3])
    assert serve(server)[0] == 3
    assert server.calls == ["start", "wait", "drain 30", "stop at once"]


def test_a_second_interrupt_ends_the_drain() -> None:
    server = Script(waits=[KeyboardInterrupt()], drains=[KeyboardInterrupt(), 2])
    assert serve(server)[0] == 2
    assert server.calls == ["start", "wait", "drain 30", "drain 0", "stop at once"]


def test_an_interrupt_while_it_starts() -> None:
    server = Script(starts=[KeyboardInterrupt()])
    assert serve(server) == (0, [])
    assert server.calls == ["start"]


def test_a_server_that_cannot_start_is_not_tried_again() -> None:
    server = Script(starts=[PortInUseError("taken")])
    with pytest.raises(PortInUseError):
        serve(server)
    assert server.calls == ["start"]


def test_a_server_that_ends_is_started_again(pauses: list[float]) -> None:
    server = Script(waits=[137, KeyboardInterrupt()])
    assert serve(server)[1][0] == "the server ended by itself (status 137): no reason; restart 1 of 2"
    assert server.calls == ["start", "wait", "stop at once", "start", "wait", "drain 30", "stop"]
    assert pauses == [0.0]


def test_a_start_that_fails_counts_too(pauses: list[float]) -> None:
    server = Script(waits=[1], starts=[None, ServerError("no GPU"), None])
    with pytest.raises(ServerGaveUpError, match="no GPU"):
        serve(server, restarts=1)
    assert server.calls == ["start", "wait", "stop at once", "start"]
    assert pauses == [0.0]


def test_it_gives_up(pauses: list[float]) -> None:
    with pytest.raises(ServerGaveUpError, match=r"^the server ended by itself \(status 1\): no reason$"):
        serve(Script(waits=[1, 1, 1, 1]), restarts=3)
    assert pauses == [0.0, 1.0, 2.0]


def test_servers_that_spoke_before_they_ended_are_not_given_up(pauses: list[float]) -> None:
    """One client that can crash a server must not end it for all."""
    server = Script(waits=[None, 139, None, 139, None, 139, KeyboardInterrupt()])
    _, said = serve(server, restarts=1, canary=Answers("", "", ""))
    assert [line.split("; ")[1] for line in said[:3]] == [
        "restart 1 of 1",
        "restart 1 of 1 in 1 s",
        "restart 1 of 1 in 2 s",
    ]
    assert pauses == [0.0, 1.0, 2.0]


def test_servers_that_never_spoke_are_given_up() -> None:
    server = Script(waits=[None, 139, None, 139])
    with pytest.raises(ServerGaveUpError):
        serve(server, restarts=1, canary=Answers("", "", failures=1))


def test_a_server_that_does_not_work_is_restarted() -> None:
    server = Script(waits=[None, None, KeyboardInterrupt()])
    _, said = serve(server, canary=Answers("", "it is silent"))
    assert said[0] == "the model does not work: it is silent; restart 1 of 2"
    assert server.calls[:5] == ["start", "wait", "wait", "stop at once", "start"]


def test_the_canary_needs_two_failures_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from token2wav_client import Client, ServerError

    outcomes = iter([ServerError("first"), None, ServerError("second"), ServerError("third")])

    def health(self: Client, **options: object) -> None:
        if error := next(outcomes):
            raise error

    monkeypatch.setattr(Client, "health", health)
    canary = Canary(1.0, Path())
    assert [canary.failure("localhost:1") for _ in range(4)] == ["", "", "", "third"]


@pytest.mark.parametrize("model", ["token2wav", "token2wav_ensemble"])
def test_the_canary_speaks_with_what_there_is(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from token2wav_client import Client

    asked: list[str] = []
    monkeypatch.setattr(Client, "health", lambda self, **_: asked.append(self._model))
    assert Canary(1.0, tmp_path).why_none == "there is no model token2wav or token2wav_ensemble"
    (tmp_path / model).mkdir()
    canary = Canary(1.0, tmp_path)
    assert canary.why_none == ""
    assert canary.failure("localhost:1") == ""
    assert asked == [model]


def test_pauses_double_until_it_is_given_up() -> None:
    back_off = BackOff(limit=5)
    assert [back_off.failed(1.0, served=False) for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 8.0, None]


def test_a_server_that_lasted_starts_anew() -> None:
    back_off = BackOff(limit=2)
    pauses = [back_off.failed(lasted_s, served=False) for lasted_s in (0.0, 0.0, 61.0, 0.0, 0.0)]
    assert pauses == [0.0, 1.0, 0.0, 1.0, None]


def test_servers_that_served_are_never_given_up_and_their_pauses_grow_to_a_bound() -> None:
    back_off = BackOff(limit=1)
    pauses = [back_off.failed(5.0, served=True) for _ in range(9)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert back_off.failed(0.0, served=False) is None


def test_no_restarts() -> None:
    assert BackOff(limit=0).failed(1000.0, served=True) is None
