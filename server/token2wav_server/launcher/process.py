"""Process of one tritonserver: it is started, waited for, drained and stopped, with nothing left
behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from token2wav_server.launcher import reaper
from token2wav_server.launcher.access import Access
from token2wav_server.launcher.binaries import find_tritonserver
from token2wav_server.launcher.errors import ServerError, ServerStartError
from token2wav_server.launcher.log import LogPump, failure_reason, last_words, matters, show
from token2wav_server.launcher.memory import resident_mib
from token2wav_server.launcher.ports import LOOPBACK, Ports, fetched, reserved
from token2wav_server.launcher.repository import fitted

_CHECKOUT_REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"
_GRACE_S = 8.0  # from SIGTERM to SIGKILL, for clients to read audio of utterances that have ended
# The same for a server that had no utterance when it was told to stop. Triton 2.51 waits for every
# gRPC stream that a client keeps open, even without a request on it, and closes none. Then nothing
# is left but to kill it: its models are unloaded after 1.1 s, unless a used stream holds them, and
# have no utterance in any case.
_IDLE_GRACE_S = 2.0
_EXIT_TIMEOUT_S = 10  # longer than the grace: Triton logs an error when its own time is over
_POLL_S = 0.05
_CRASHES = (128 + signal.SIGABRT, 128 + signal.SIGSEGV)
# names a file to the models, which refuse new utterances once it is there
DRAIN_VARIABLE = "TOKEN2WAV_DRAIN_FILE"
_DRAIN_POLL_S = 0.1
# one for each part that holds it
_OPEN_STREAMS = re.compile(rb"^token2wav_open_streams\{[^}]*\} (\S+)$", re.MULTILINE)


class TritonServer:
    """Server process of Triton for one model folder; use it as a context manager.

    Entering starts the server and waits until its models are loaded. Leaving stops it and removes
    everything
    it left: processes, shared memory, temporary files. The same happens when this process dies in
    any way.

    Args:
        model: folder with the weights; Triton models read it from the variable TOKEN2WAV_MODEL.
        config: server configuration file, in TOKEN2WAV_CONFIG; without one the variable is not set.
        model_repository: Triton model repository; by default that of the checkout this package lies
            in.
        ports: ports to listen on; ``Ports.free()`` where they don't matter.
        host: address to listen on.
        access: TLS settings, and the key to what is closed; by default no TLS, and a key that
            nobody is told.
        log_file: file that takes all output of the server; by default it goes to this process's
            stderr.
        verbose: with false, stderr gets only warnings, errors and what models print.
        extra_args: further arguments for tritonserver; they must leave HTTP and metrics on, which
            tell when it is ready.
        ready_timeout_s: seconds that loading the models may take.

    Attributes:
        grpc_url, http_url, metrics_url: HOST:PORT of the services, as clients on this machine want
            it.
        version: version of tritonserver, once it has been ready.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        config: Path | str | None = None,
        model_repository: Path | str | None = None,
        ports: Ports | None = None,
        host: str = "127.0.0.1",
        access: Access | None = None,
        log_file: Path | str | None = None,
        verbose: bool = True,
        extra_args: Sequence[str] = (),
        ready_timeout_s: float = 600.0,
    ) -> None:
        self.model = Path(model).resolve()
        self.config = Path(config).resolve() if config is not None else None
        self.model_repository = Path(model_repository or _CHECKOUT_REPOSITORY).resolve()
        self.ports = ports or Ports()
        self.host = host
        self.access = access or Access()
        self._log_file = Path(log_file) if log_file is not None else None
        self._verbose = verbose
        self._extra_args = list(extra_args)
        self._ready_timeout_s = ready_timeout_s
        self._reaper: subprocess.Popen[bytes] | None = None
        self._log: LogPump | None = None
        self._drain_file = Path()
        self._stop_grace_s = _GRACE_S
        self._inner = self.ports
        reached = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
        self.grpc_url, self.http_url, self.metrics_url = (
            f"[{reached}]:{port}" if ":" in reached else f"{reached}:{port}"
            for port in (self.ports.grpc, self.ports.http, self.ports.metrics)
        )
        self.version = ""
        self._cleanup = contextlib.ExitStack()

    @property
    def pid(self) -> int:
        """Process id of tritonserver itself, which is the parent of the Python stubs."""
        reaper_pid = self._running().pid
        return int(Path(f"/proc/{reaper_pid}/task/{reaper_pid}/children").read_text().split()[0])

    @property
    def running(self) -> bool:
        """Says whether it was started and not stopped; one that has ended by itself still counts."""
        return self._reaper is not None

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server and returns when all its models are ready; once more if it aborts or
        faults on the way.

        Raises:
            TritonNotFoundError: no usable tritonserver on this machine.
            PortInUseError: a port is taken.
            ServerStartError: the server ended, with the reason from its log, or was not ready in
                time.
        """
        if self._reaper is not None:
            raise ServerError("the server is already started: stop it first")
        if not self.model_repository.is_dir():
            raise ServerError(
                f"model repository {self.model_repository} is not a folder: name it explicitly"
            )
        self.ports.check_free(self.host)
        try:
            self._launch()
            if not self._become_ready():
                show(
                    f"tritonserver could not start: {self.failure_reason()}; trying once more",
                    sys.stderr,
                )
                self.stop()
                self._launch()
                self._become_ready(last=True)
        except BaseException:
            self.stop()
            raise

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits until the server ends.

        Returns:
            Its exit status (128 + n after signal n), or None if it still runs after ``timeout_s``.
        """
        try:
            return self._running().wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def memory_mib(self) -> int:
        """Returns the resident memory of tritonserver and its model processes, 0 if it has ended."""
        try:
            return resident_mib(self.pid)
        except (OSError, IndexError):  # the reaper has no child any more
            return 0

    def failure_reason(self) -> str:
        """Returns why a server has ended: what its reaper saw, the signal that killed it, or what
        it printed.
        """
        assert self._log is not None
        self._log.join(timeout=2)
        return failure_reason([*self._log.lines], self.wait(timeout_s=0) if self.running else None)

    def drain(self, grace_s: float) -> int:
        """Has new utterances refused and waits until the open ones have ended.

        Triton cannot do it alone: after SIGTERM it lets open requests finish, but an utterance
        consists of many, and its next one is refused. So the models look for a file when an
        utterance starts, and SIGTERM comes afterwards.

        Returns:
            Number of utterances that are lost: still open after ``grace_s``, or when the server
                ended.
        """
        deadline = time.monotonic() + grace_s
        # the server has ended, and its reaper cleaned up
        with contextlib.suppress(FileNotFoundError):
            self._drain_file.touch()
        open_utterances = None
        self._stop_grace_s = _IDLE_GRACE_S
        while True:
            # The pause also lets an utterance that was just admitted show in the metrics.
            if self.wait(_DRAIN_POLL_S) is not None:
                return open_utterances or 0
            if (told := fetched(self._inner.metrics, "/metrics")) is not None:
                open_utterances = max(
                    (int(float(count)) for count in _OPEN_STREAMS.findall(told)), default=0
                )
            if open_utterances == 0:
                return 0
            self._stop_grace_s = _GRACE_S
            if time.monotonic() > deadline:
                # one at least, as far as a server that does not answer is concerned
                return open_utterances or 1

    def stop(self, *, at_once: bool = False) -> None:
        """Stops the server and removes what it left behind; does nothing if it does not run.

        Args:
            at_once: don't wait for requests that it works on, nor for clients to disconnect.
        """
        if at_once and self._reaper is not None:
            self._reaper.send_signal(reaper.STOP_AT_ONCE)
        self._cleanup.close()

    def _launch(self) -> None:
        # Not above: model processes import this package too, and need no HTTP.
        from token2wav_server.launcher.front import Front

        shm_prefix = f"token2wav-{uuid.uuid4().hex[:12]}-"
        folder = Path(tempfile.mkdtemp(prefix="token2wav-server-"))
        self._cleanup.callback(setattr, self, "_reaper", None)
        self._cleanup.callback(reaper.remove_leftovers, folder, shm_prefix)
        self._stop_grace_s = _GRACE_S
        self._inner = Ports(self._reserve(), self.ports.grpc, self._reserve())
        self._cleanup.enter_context(Front(self.host, self.ports, self._inner, self.access))
        triton, repository = (
            find_tritonserver(folder),
            fitted(self.model_repository, self.model, folder),
        )
        sink = sys.stderr
        if self._log_file is not None:
            sink = self._cleanup.enter_context(self._log_file.open("w", encoding="utf-8"))
        environment = triton.environment | {"TOKEN2WAV_MODEL": str(self.model)}
        self._drain_file = folder / "drain"
        environment[DRAIN_VARIABLE] = str(self._drain_file)
        environment.pop("TOKEN2WAV_CONFIG", None)
        if self.config is not None:
            environment["TOKEN2WAV_CONFIG"] = str(self.config)
        command = [
            triton.executable,
            *self._server_arguments(repository, triton.backends, shm_prefix),
        ]
        command = [reaper.__file__, os.getpid(), folder, shm_prefix, _GRACE_S, *command]
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C in a terminal goes to the launcher alone
        )
        self._cleanup.callback(self._stop_reaper, self._reaper)
        assert self._reaper.stdout is not None
        show_all = self._verbose or self._log_file is not None
        self._log = LogPump(self._reaper.stdout, sink, (lambda _: True) if show_all else matters)
        self._log.start()

    def _server_arguments(self, repository: Path, backends: Path, shm_prefix: str) -> list[str]:
        return [
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--http-address={LOOPBACK}",
            f"--http-port={self._inner.http}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={LOOPBACK}",
            f"--metrics-port={self._inner.metrics}",
            f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
            "--disable-auto-complete-config",  # else every model.py is loaded twice
            *self.access.arguments(),
            *self._extra_args,
        ]

    def _become_ready(self, *, last: bool = False) -> bool:
        """Waits until all models are ready; False if the server crashes meanwhile, unless this is
        the last try.

        Triton's Python backend aborts now and then while a model starts on a busy machine (seen
        with 2.51: "lock_exception", in 1 of 200 starts), and starts the next time.
        """
        assert self._log is not None
        deadline = time.monotonic() + self._ready_timeout_s
        inner = self._inner
        # The metrics service starts last.
        while (
            fetched(inner.http, "/v2/health/ready") is None
            or fetched(inner.metrics, "/metrics") is None
        ):
            if (status := self.wait(timeout_s=_POLL_S)) is not None:
                if status in _CRASHES and not last:
                    return False
                raise ServerStartError(f"tritonserver could not start: {self.failure_reason()}")
            if time.monotonic() > deadline:
                said = last_words([*self._log.lines]) or "nothing"
                raise ServerStartError(
                    f"tritonserver was not ready after {self._ready_timeout_s:g} s: give it more "
                    f"time, "
                    f"or look at its full log (--verbose), which ends with: {said}"
                )
        self.version = json.loads(fetched(inner.http, "/v2") or b"{}").get("version", "")
        return True

    def _reserve(self) -> int:
        """Reserves a free port of the loopback for tritonserver until it is stopped."""
        port: int = self._cleanup.enter_context(reserved(LOOPBACK)).getsockname()[1]
        return self._reserve() if port in astuple(self.ports) else port

    def _stop_reaper(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(self._stop_grace_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
            process.send_signal(reaper.STOP_AT_ONCE)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            if isinstance(reason, KeyboardInterrupt):
                raise
        finally:
            process.kill()  # a reaper that hangs: its server dies with it
            process.wait()
        if self._log is not None:
            self._log.join(timeout=2)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._reaper is None:
            raise ServerError("the server is not running: start it first")
        return self._reaper
