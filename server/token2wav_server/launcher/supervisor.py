"""Supervisor of a server: it restarts one that is of no use any more, and drains it in the end.

Always the whole tritonserver is restarted. Triton's own ways to reload a model were tried (server 2.51): `load` of a
model whose process has died does nothing, and `unload` first leaves the old process, its shared memory and all requests
that wait for it behind. A server that is gone tells its clients at once, and load balancers too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from token2wav_server.launcher.canary import Canary
from token2wav_server.launcher.errors import ServerError, ServerGaveUpError
from token2wav_server.launcher.process import TritonServer
from token2wav_server.launcher.status import Status

_SETTLED_S = 60.0
_LONGEST_PAUSE_S = 30.0


@dataclass
class BackOff:
    """Count of failures in a row; it says how long to wait before the next start, and when to give up.

    Only failures of servers that never served are counted towards giving up: what one client can crash must not end the
    service of all. Pauses grow all the same, until a server lasts for a minute.

    Attributes:
        limit: restarts in a row of servers that never served, at most; 0 for none at all.
        failures: failed servers in a row, so far.
    """

    limit: int
    failures: int = 0
    _pause_s: float = 0.0

    def failed(self, lasted_s: float, *, served: bool) -> float | None:
        """Counts a failure.

        Args:
            lasted_s: time for which the server was ready before.
            served: whether it had spoken by then.

        Returns:
            Seconds to wait before the next start: 0, 1, 2, 4 ... up to 30; None if there should be none.
        """
        if lasted_s >= _SETTLED_S:
            self._pause_s = 0.0
        if served or lasted_s >= _SETTLED_S:
            self.failures = 0
        self.failures += 1
        if self.failures > self.limit:
            return None
        pause_s, self._pause_s = self._pause_s, min(max(1.0, 2 * self._pause_s), _LONGEST_PAUSE_S)
        return pause_s


class Supervisor:
    """Supervisor of one server, which it runs until it is told to stop.

    Args:
        server: server process, not started yet.
        back_off: decides how often and how soon it is started again.
        canary: notices a server that runs and does not work; None if nothing does.
        grace_s: seconds that open utterances have at the end.
        announce: takes what a person should know, one line at a time.
        tell: takes the status that load balancers should know.
        notice_s: seconds before the drain in which new utterances are still taken while load balancers learn of it.
    """

    def __init__(
        self,
        server: TritonServer,
        *,
        back_off: BackOff,
        canary: Canary | None,
        grace_s: float,
        announce: Callable[[str], None],
        tell: Callable[[Status], None] = lambda status: None,
        notice_s: float = 0.0,
    ) -> None:
        self._server = server
        self._back_off = back_off
        self._canary = canary
        self._grace_s = grace_s
        self._announce = announce
        self._tell = tell
        self._notice_s = notice_s
        self._served = False  # whether the server that runs now, or ran last, has spoken to the canary

    def serve(self) -> int:
        """Serves until KeyboardInterrupt; a second one cuts the drain short.

        Returns:
            Number of utterances that were cut off.

        Raises:
            ServerError: it could not be started.
            ServerGaveUpError: it failed too often after that.
        """
        try:
            self._server.start()
            while True:
                self._announce_ready()
                self._tell(Status.READY)
                ready_at, self._served = time.monotonic(), False
                failure = self._wait_for_failure()
                self._tell(Status.STARTING)
                self._restart(failure, time.monotonic() - ready_at)
        except KeyboardInterrupt:
            return self._drain()
        finally:
            self._server.stop()

    def _announce_ready(self) -> None:
        server = self._server
        self._announce(
            f"ready, gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}; "
            f"Triton {server.version}, its HTTP and metrics behind a front"
        )

    def _wait_for_failure(self) -> str:
        canary = self._canary
        wait_s = 0.0 if canary else None  # the first canary tells at once whether it serves
        while (status := self._server.wait(wait_s)) is None:
            if canary:
                if problem := canary.failure(self._server.grpc_url):
                    return f"the model does not work: {problem}"
                self._served = self._served or not canary.failures
                wait_s = canary.interval_s
        return f"the server ended by itself (status {status}): {self._server.failure_reason()}"

    def _restart(self, failure: str, lasted_s: float) -> None:
        while True:
            pause_s = self._back_off.failed(lasted_s, served=self._served)
            if pause_s is None:
                raise ServerGaveUpError(failure)
            self._announce(
                f"{failure}; restart {self._back_off.failures} of {self._back_off.limit}"
                + (f" in {pause_s:g} s" if pause_s else "")
            )
            self._server.stop(at_once=True)
            time.sleep(pause_s)
            try:
                self._server.start()
                return
            except ServerError as error:
                failure, lasted_s, self._served = str(error), 0.0, False

    def _drain(self) -> int:
        if not self._server.running:
            return 0
        hurry = False
        self._tell(Status.DRAINING)
        try:
            if self._notice_s:
                self._announce(f"going to stop: new streams are still taken for {self._notice_s:g} s")
                self._server.wait(self._notice_s)
            if self._grace_s:
                self._announce(f"draining: new streams are refused, open ones have {self._grace_s:g} s")
            lost = self._server.drain(self._grace_s)
        except KeyboardInterrupt:
            hurry = True
            lost = self._server.drain(0)
        # Triton's own time for requests that are open adds nothing for streams that had theirs, and it tends to crash.
        self._server.stop(at_once=hurry or lost > 0)
        return lost
