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
from token2wav_server.launcher.http_ports import Status
from token2wav_server.launcher.process import TritonServer

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
        """Counts the failure of a server that was ready for so long, and had spoken by then or not.

        Returns:
            Seconds to wait before the next start: 0, 1, 2, 4 ... up to 30; None if there should be none.
        """
        if lasted_s >= _SETTLED_S:
            self._pause_s = 0.0
        self.failures = 1 if served or lasted_s >= _SETTLED_S else self.failures + 1
        if self.failures > self.limit:
            return None
        pause_s, self._pause_s = self._pause_s, min(max(1.0, 2 * self._pause_s), _LONGEST_PAUSE_S)
        return pause_s


@dataclass
class Supervisor:
    """Supervisor of one server, which it runs until it is told to stop.

    Attributes:
        server: server process, not started yet.
        back_off: decides how often and how soon it is started again.
        canary: notices a server that runs and does not work; None if nothing does.
        grace_s: seconds that open utterances have at the end.
        announce: takes what a person should know, one line at a time.
        tell: takes the status that load balancers should know.
        notice_s: seconds before the drain in which new utterances are still taken while load balancers learn of it.
    """

    server: TritonServer
    back_off: BackOff
    canary: Canary | None
    grace_s: float
    announce: Callable[[str], None]
    tell: Callable[[Status], None] = lambda status: None
    notice_s: float = 0.0

    def serve(self) -> int:
        """Serves until KeyboardInterrupt; a second one cuts the drain short.

        Returns:
            Number of utterances that were cut off.

        Raises:
            ServerError: it could not be started.
            ServerGaveUpError: it failed too often after that.
        """
        try:
            self.server.start()
            while True:
                self._serve_once()
        except KeyboardInterrupt:
            return self._drain()
        finally:
            self.server.stop()

    def _serve_once(self) -> None:
        """Serves until the server fails, and starts it again."""
        server = self.server
        self.announce(
            f"ready, gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}; "
            f"Triton {server.version}, its HTTP and metrics behind a front"
        )
        self.tell(Status.READY)
        ready_at = time.monotonic()
        failure, served = self._wait_for_failure()
        lasted_s = time.monotonic() - ready_at
        self.tell(Status.STARTING)
        while (pause_s := self.back_off.failed(lasted_s, served=served)) is not None:
            restart = f"restart {self.back_off.failures} of {self.back_off.limit}"
            self.announce(f"{failure}; {restart}" + (f" in {pause_s:g} s" if pause_s else ""))
            server.stop(at_once=True)
            time.sleep(pause_s)
            try:
                return server.start()
            except ServerError as error:
                failure, lasted_s, served = str(error), 0.0, False
        raise ServerGaveUpError(failure)

    def _wait_for_failure(self) -> tuple[str, bool]:
        """Returns how the server failed, and whether it had spoken to the canary before."""
        canary, served = self.canary, False
        wait_s = 0.0 if canary else None  # the first canary tells at once whether it serves
        while (status := self.server.wait(wait_s)) is None:
            if canary:
                if problem := canary.failure(self.server.grpc_url):
                    return f"the model does not work: {problem}", served
                served = served or not canary.failures
                wait_s = canary.interval_s
        return f"the server ended by itself (status {status}): {self.server.failure_reason()}", served

    def _drain(self) -> int:
        if not self.server.running:
            return 0
        hurry = False
        self.tell(Status.DRAINING)
        try:
            if self.notice_s:
                self.announce(f"going to stop: new streams are still taken for {self.notice_s:g} s")
                self.server.wait(self.notice_s)
            if self.grace_s:
                self.announce(f"draining: new streams are refused, open ones have {self.grace_s:g} s")
            lost = self.server.drain(self.grace_s)
        except KeyboardInterrupt:
            hurry = True
            lost = self.server.drain(0)
        # Triton's own time for requests that are open adds nothing for streams that had theirs, and it tends to crash.
        self.server.stop(at_once=hurry or lost > 0)
        return lost
