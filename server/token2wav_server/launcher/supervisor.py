"""Supervisor of a server: it restarts one that is of no use any more, and drains it in the end.

Always the whole tritonserver is restarted. Triton's own ways to reload a model were tried (server
2.51): `load` of a model whose process has died does nothing, and `unload` first leaves the old
process, its shared memory and all requests that wait for it behind. A server that is gone tells its
clients at once, and load balancers too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from token2wav_server.launcher.errors import ServerError
from token2wav_server.launcher.http_ports import Status
from token2wav_server.launcher.process import TritonServer

if TYPE_CHECKING:
    from token2wav_server.launcher.access import Certificates

MODELS = ("token2wav", "token2wav_ensemble")
_CANARIES = 2
_SETTLED_S = 60.0
_LONGEST_PAUSE_S = 30.0
_MEMORY_POLL_S = 1.0  # a flood of HTTP/2 frames takes 240 MB a second


class Canary:
    """Canary of a server: it notices a model process that hangs, which lives on while Triton says
    that it is ready.

    It speaks three tokens when it is asked to, to any of ``MODELS`` in a repository. It needs the
    client library, which is imported here and not above, so that the launcher starts without it and
    fast.

    Attributes:
        interval_s: seconds between utterances, and the time that one may take.
        why_none: reason why nothing can be tried; empty if it can.
    """

    def __init__(
        self, interval_s: float, model_repository: Path, certificates: Certificates | None = None
    ) -> None:
        self.interval_s = interval_s
        found = [model for model in MODELS if (model_repository / model).is_dir()]
        self._model = (found or MODELS)[0]
        self.why_none = "" if found else f"there is no model {' or '.join(MODELS)}"
        try:
            import token2wav_client  # noqa: F401

            self._tls = certificates.for_canary() if certificates else None
        except ImportError as error:
            self.why_none = f"the client library is not installed ({error})"

    def problem(self, grpc_url: str) -> str:
        """Speaks once, and returns what went wrong, or ''."""
        from token2wav_client import Client, ClientError

        patience_s = self.interval_s
        try:
            with Client(
                grpc_url,
                model=self._model,
                connect_timeout_s=patience_s,
                response_timeout_s=patience_s,
                tls=self._tls,
            ) as client:
                client.health(timeout_s=patience_s)
        except ClientError as error:
            return str(error)
        return ""


@dataclass(frozen=True)
class _Failure:
    """Failure of a server: the reason, and whether it still works, so that its open utterances may
    end.
    """

    reason: str
    works: bool = False


@dataclass
class Supervisor:
    """Supervisor of one server, which it runs until it is told to stop.

    Attributes:
        server: server process, not started yet.
        canary: notices a server that runs and does not work; None if nothing does.
        grace_s: seconds that open utterances have at the end.
        announce: takes what a person should know, one line at a time.
        tell: takes the status that load balancers should know.
        memory_mib: resident memory that the server may take before it is drained and restarted; 0
            does not bound it.
        notice_s: seconds before the drain in which new utterances are still taken while load
            balancers learn of it.
        clock, sleep: monotonic seconds, and what waits for some.
    """

    server: TritonServer
    canary: Canary | None
    grace_s: float
    announce: Callable[[str], None]
    tell: Callable[[Status], None] = lambda status: None
    notice_s: float = 0.0
    memory_mib: int = 0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def serve(self) -> int:
        """Serves until KeyboardInterrupt; a second one cuts the drain short.

        A server that was ready is started again whenever it fails: what one client can crash must
        not end the service of all. Those that fail within a minute, one after the other, are
        started again after 0, 1, 2, 4 ... 30 s. One that never spoke would fail again; to try it
        later is the business of whoever runs this process.

        Returns:
            Number of utterances that were cut off.

        Raises:
            ServerError: it could not be started, or failed before it had spoken to the canary.
        """
        server, pause_s = self.server, 0.0
        try:
            while True:
                server.start()
                if failure := self._failure(until_it_speaks=True):
                    raise ServerError(
                        failure.reason + (" at its start: raise the bound" if failure.works else "")
                    )
                self.announce(
                    f"ready, gRPC {server.grpc_url}, HTTP {server.http_url}, metrics "
                    f"{server.metrics_url}; "
                    f"Triton {server.version}, its HTTP and metrics behind a front"
                )
                self.tell(Status.READY)
                ready_at = self.clock()
                failure = self._failure()
                assert failure is not None
                if self.clock() - ready_at >= _SETTLED_S:
                    pause_s = 0.0
                cut_off = self._drained(failure.reason) if failure.works else 0
                self.tell(Status.STARTING)
                cut_off_too = f", streams that were cut off: {cut_off}" if cut_off else ""
                in_time = f" in {pause_s:g} s" if pause_s else ""
                self.announce(f"{failure.reason}{cut_off_too}; restarting it{in_time}")
                server.stop(at_once=cut_off > 0 or not failure.works)
                self.sleep(pause_s)
                pause_s = min(max(1.0, 2 * pause_s), _LONGEST_PAUSE_S)
        except KeyboardInterrupt:
            return self._drain()
        finally:
            server.stop()

    def _failure(self, *, until_it_speaks: bool = False) -> _Failure | None:
        """Waits until the server fails; with `until_it_speaks` until it has spoken, too, which
        gives None.
        """
        canary, failures = self.canary, 0
        pause_s = canary.interval_s if canary else None
        wait_s = 0.0 if until_it_speaks else pause_s
        while (failure := self._failure_within(wait_s)) is None:
            problem = canary.problem(self.server.grpc_url) if canary else ""
            if until_it_speaks and not problem:
                return None
            failures = failures + 1 if problem else 0
            if failures == _CANARIES:
                return _Failure(f"the model does not work: {problem}")
            wait_s = pause_s
        return failure

    def _failure_within(self, seconds: float | None) -> _Failure | None:
        """Waits for so long, or for ever, until the server has ended or takes too much memory; None
        if neither.
        """
        left_s = math.inf if seconds is None else seconds
        while True:
            status = self.server.wait(min(left_s, _MEMORY_POLL_S) if self.memory_mib else seconds)
            if status is not None:
                return _Failure(
                    f"the server ended by itself (status {status}): {self.server.failure_reason()}"
                )
            if self.memory_mib and (taken := self.server.memory_mib()) > self.memory_mib:
                return _Failure(
                    f"the server takes {taken} MiB of memory, more than "
                    f"--memory-mib={self.memory_mib}",
                    works=True,
                )
            left_s -= _MEMORY_POLL_S
            if not self.memory_mib or left_s <= 0:
                return None

    def _drained(self, reason: str = "") -> int:
        """Lets open utterances end, and returns the number of the ones that did not."""
        because = f"{reason}; " if reason else ""
        self.tell(Status.DRAINING)
        if self.notice_s:
            self.announce(
                f"{because}going to stop: new streams are still taken for {self.notice_s:g} s"
            )
            self.server.wait(self.notice_s)
        if self.grace_s:
            self.announce(
                f"{because}draining: new streams are refused, open ones have {self.grace_s:g} s"
            )
        return self.server.drain(self.grace_s)

    def _drain(self) -> int:
        if not self.server.running:
            return 0
        hurry = False
        try:
            lost = self._drained()
        except KeyboardInterrupt:
            hurry = True
            lost = self.server.drain(0)
        # Triton's own time for requests that are open adds nothing for streams that had theirs, and
        # it tends to crash.
        self.server.stop(at_once=hurry or lost > 0)
        return lost
