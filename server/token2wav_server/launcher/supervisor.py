"""Supervisor of a server: restarts it after a failure, and drains it at the end.

If the engine fails, the supervisor restarts the engine alone, so that ports and connections stay
open. If that does not help, or if anything else fails, it restarts the whole server.

It never reloads a single model of Triton, because that does not help (tried with server 2.51).
`load` does nothing for a model whose process has died. `unload` before `load` leaves the old
process, its shared memory and all its waiting requests behind.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from token2wav.serving.door.sequences import CLIENT_HEADER
from token2wav_server.launcher.errors import ServerError, ServerStartError
from token2wav_server.launcher.http_ports import Status
from token2wav_server.launcher.process import TritonServer

if TYPE_CHECKING:
    from token2wav_client import Client
    from token2wav_server.launcher.access import Certificates

MODELS = ("token2wav", "token2wav_ensemble")
_CANARIES = 2  # failed syntheses in a row after which the server is restarted
_SETTLED_S = 60.0  # time without failure after which the pause before a restart is reset
_LONGEST_PAUSE_S = 30.0
_CANCEL_S = 2.0  # longest time for the end of a cancelled canary
_POLL_S = 1.0  # short, because a flood of HTTP/2 frames takes 240 MB of memory per second


class Problem(NamedTuple):
    """Problem of a test synthesis.

    Attributes:
        silent: whether the server gave no answer in time. Then it may only be busy.
    """

    sentence: str
    silent: bool = False


class Canary:
    """Canary of a server: a test synthesis that detects a model process which hangs.

    Triton still reports that it is ready while a model process hangs. The canary synthesizes three
    tokens with the first model of ``MODELS`` that is loaded. It needs the client library, which
    is imported only here, so that the launcher starts fast, and also without the library.

    Args:
        patience_s: longest time of one synthesis.
        name: client name, from which the model knows the canary (`TritonServer.canary_name`); empty
            for an ordinary client.

    Attributes:
        unavailable_reason: reason why the canary cannot run; empty if it can.

    Raises:
        ConfigError: the canary cannot connect with these certificates.
    """

    def __init__(
        self,
        interval_s: float,
        patience_s: float,
        models: Sequence[str],
        certificates: Certificates | None = None,
        name: str = "",
    ) -> None:
        self.interval_s = interval_s
        self._patience_s = patience_s
        self._headers = {CLIENT_HEADER: name} if name else {}
        self._certificates = certificates
        self._client: Client | None = None
        self._thread: threading.Thread | None = None
        candidates = [model for model in MODELS if model in models]
        self._model = (candidates or MODELS)[0]
        self.unavailable_reason = "" if candidates else f"no model {' or '.join(MODELS)} is loaded"
        try:
            import token2wav_client  # noqa: F401

            self.read_certificates()
        except ImportError as error:
            self.unavailable_reason = f"the client library is not installed ({error})"

    def read_certificates(self) -> None:
        """Reads the certificates, as a server does at its start. Raises ConfigError as `Canary`."""
        self._tls = self._certificates.for_canary() if self._certificates else None

    def start(self, grpc_url: str) -> Future[Problem | None]:
        """Starts one synthesis, whose result is its problem; None if it succeeds.

        The synthesis has a thread of its own, because a signal raises KeyboardInterrupt in the main
        thread. Inside the client or gRPC, Python could drop this exception. It could also leave a
        lock held forever.
        """
        from token2wav_client import Client

        outcome = Future[Problem | None]()
        client = Client(
            grpc_url,
            model=self._model,
            connect_timeout_s=self._patience_s,
            response_timeout_s=self._patience_s,
            tls=self._tls,
            headers=self._headers,
        )

        def run() -> None:
            try:
                outcome.set_result(self._problem(client))
            except BaseException as error:  # the main thread waits for a result without a limit
                outcome.set_exception(error)

        self._client = client
        self._thread = threading.Thread(target=run, name="canary", daemon=True)
        self._thread.start()
        return outcome

    def cancel(self) -> None:
        """Cancels a synthesis that runs, so that a drain does not count it as an open stream."""
        if self._client is not None and self._thread is not None and self._thread.is_alive():
            self._client.close()
            self._thread.join(_CANCEL_S)

    def _problem(self, client: Client) -> Problem | None:
        from token2wav_client import (
            ClientError,
            ModelNotReadyError,
            ResponseTimeoutError,
            ServerUnavailable,
        )

        try:
            with client:
                client.health(timeout_s=self._patience_s)
        except ModelNotReadyError as error:
            return Problem(str(error))
        except (ResponseTimeoutError, ServerUnavailable) as error:
            return Problem(str(error), silent=True)
        except ClientError as error:
            return Problem(str(error))
        return None


@dataclass(frozen=True)
class _Failure:
    """Failure of a server.

    Attributes:
        reason: sentence for the operator.
        works: whether the server still works, so that it can be drained before the restart.
        of_engine: whether a restart of the engine alone may help.
    """

    reason: str
    works: bool = False
    of_engine: bool = False


@dataclass
class Supervisor:
    """Supervisor of one server; `serve` runs the server until KeyboardInterrupt.

    Attributes:
        canary: canary that detects a running server which does not work; None for no such test.
        grace_s: seconds that open utterances have to end during a drain.
        set_status: callback that reports the status of the server to load balancers.
        notice_s: seconds before a drain in which the server still admits new utterances, while the
            status port already reports the drain to load balancers.
        memory_mib: limit for the resident memory of the server in MiB; 0 for no limit. A server
            that exceeds it is drained and restarted.
        interrupted: callback that returns whether a signal has asked to stop. Python drops a
            KeyboardInterrupt that is raised in a finalizer, so the exception alone is not enough.
    """

    server: TritonServer
    canary: Canary | None
    grace_s: float
    announce: Callable[[str], None]
    set_status: Callable[[Status], None] = lambda status: None
    notice_s: float = 0.0
    memory_mib: int = 0
    interrupted: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def serve(self) -> int:
        """Serves until KeyboardInterrupt, and then drains the server.

        A second KeyboardInterrupt ends the drain early.

        A server that was ready is restarted after every failure, because a client that crashes the
        server must not end the service for all other clients. If servers fail within a minute each,
        the pauses before the restarts are 0, 1, 2, 4 ... 30 s. A server that fails before its first
        canary succeeds is not restarted, because it would fail again. The operator may start it
        again later.

        Returns:
            The utterances that were cut off.

        Raises:
            ServerError: the server could not be started, or failed before its first canary
                succeeded.
        """
        server, pause_s, engine_only = self.server, 0.0, False
        try:
            while True:
                self._check_interrupted()
                failure = self._failure_at_start(engine_only=engine_only)
                if failure is None:
                    note = " again with a new engine" if engine_only else ""
                    # A script that waits for the next line may then ask the status port at once.
                    self.set_status(Status.READY)
                    self.announce(
                        f"ready{note}, gRPC {server.grpc_url}, HTTP {server.http_url}, metrics "
                        f"{server.metrics_url}; Triton {server.version}{_front_note(server)}, with "
                        "a proxy for its HTTP and metrics ports"
                    )
                    ready_at = self.clock()
                    failure = self._failure()
                    assert failure is not None
                    engine_only = failure.of_engine
                    if self.clock() - ready_at >= _SETTLED_S:
                        pause_s = 0.0
                else:  # the restart of the engine alone has not helped
                    engine_only = False
                cut_off = self._drained(failure.reason) if failure.works else 0
                self.set_status(Status.STARTING)
                cut_off_note = f"; streams that were cut off: {cut_off}" if cut_off else ""
                pause_note = f" in {pause_s:g} s" if pause_s else ""
                part = "engine" if engine_only else "server"
                self.announce(f"{failure.reason}{cut_off_note}; restarting the {part}{pause_note}")
                if not engine_only:
                    server.stop(at_once=cut_off > 0 or not failure.works)
                self.sleep(pause_s)
                pause_s = min(max(1.0, 2 * pause_s), _LONGEST_PAUSE_S)
        except KeyboardInterrupt:
            return self._drain()
        finally:
            server.stop()

    def _failure_at_start(self, *, engine_only: bool) -> _Failure | None:
        """Starts the server or only its engine, and waits for the first success of its canary.

        Returns:
            The failure of a new engine; None after a success.

        Raises:
            ServerError: the whole server could not be started, or failed.
        """
        if engine_only:
            try:
                self.server.restart_engine()
            except ServerStartError as error:
                return _Failure(str(error))
            return self._failure(until_ready=True)
        if self.canary:
            self.canary.read_certificates()
        self.server.start()
        if failure := self._failure(until_ready=True):
            raise ServerError(
                failure.reason + (" at its start; raise the limit" if failure.works else "")
            )
        return None

    def _failure(self, *, until_ready: bool = False) -> _Failure | None:
        """Waits until the server fails, running the canary at regular intervals.

        A canary that gets no answer in time is a failure only if no batch has finished since it
        began. If it follows a failure, no batch may have finished since that canary began.

        Args:
            until_ready: whether to return None as soon as a canary succeeds. The first canary then
                runs without a pause before it.
        """
        canary, failures, batches = self.canary, 0, 0
        pause_s = canary.interval_s if canary else None
        wait_s = 0.0 if until_ready else pause_s
        while (failure := self._failure_within(wait_s)) is None:
            if canary and not failures:
                batches = self.server.batches()
            problem = self._canary_problem(canary) if canary else None
            if isinstance(problem, _Failure):
                return problem
            if until_ready and not problem:
                return None
            silent = problem is not None and problem.silent
            finished = self.server.batches() - batches if silent else 0
            if problem and finished > 0:
                self.announce(
                    f"the canary is slow: {problem.sentence}; the model works, because it has "
                    f"computed {finished} batches meanwhile, so the server is not restarted"
                )
            failures = failures + 1 if problem and finished <= 0 else 0
            if problem and failures == _CANARIES:
                return _Failure(
                    f"the model does not work: {problem.sentence}",
                    of_engine=self.server.engine_pid > 0,
                )
            wait_s = pause_s
        return failure

    def _canary_problem(self, canary: Canary) -> Problem | _Failure | None:
        """Runs a canary. The result is a failure if the server fails meanwhile."""
        outcome = canary.start(self.server.grpc_url)
        try:
            while not wait_for([outcome], _POLL_S).done:
                if failure := self._failure_within(0.0):
                    return failure
        finally:
            canary.cancel()
        return outcome.result()

    def _failure_within(self, seconds: float | None) -> _Failure | None:
        """Waits until the server or its engine ends, or the server exceeds its memory limit.

        Args:
            seconds: time after which the result is None; None for no limit.
        """
        left_s = math.inf if seconds is None else seconds
        while True:
            self._check_interrupted()
            status = self.server.wait(min(left_s, _POLL_S))
            if status is not None:
                return _Failure(
                    f"the server ended by itself (status {status}): {self.server.failure_reason()}"
                )
            if reason := self.server.engine_failure():
                return _Failure(reason, of_engine=True)
            if self.memory_mib and (memory_mib := self.server.memory_mib()) > self.memory_mib:
                return _Failure(
                    f"the server takes {memory_mib} MiB of memory, more than "
                    f"--memory-mib={self.memory_mib}",
                    works=True,
                )
            left_s -= _POLL_S
            if left_s <= 0:
                return None

    def _check_interrupted(self) -> None:
        if self.interrupted():
            raise KeyboardInterrupt

    def _drained(self, reason: str = "") -> int:
        """Drains the server, and counts the utterances that did not end in time.

        The reason is shown to the operator, and is empty for a normal stop.
        """
        prefix = f"{reason}; " if reason else ""
        self.set_status(Status.DRAINING)
        if self.notice_s:
            self.announce(
                f"{prefix}stopping: new streams are still accepted for {self.notice_s:g} s"
            )
            self.server.wait(self.notice_s)
        if self.grace_s:
            self.announce(
                f"{prefix}draining: new streams are refused, and open streams have "
                f"{self.grace_s:g} s"
            )
        return self.server.drain(self.grace_s)

    def _drain(self) -> int:
        if not self.server.running:
            return 0
        hurry = False
        try:
            cut_off = self._drained()
        except KeyboardInterrupt:
            hurry = True
            cut_off = self.server.drain(0)
        # If utterances were cut off, the server is stopped at once. Their grace period is over, so
        # Triton's own waiting time for open requests would not help them, and Triton tends to crash
        # during this time.
        self.server.stop(at_once=hurry or cut_off > 0)
        return cut_off


def _front_note(server: TritonServer) -> str:
    return f" with the {server.front} front" if server.front else ""
