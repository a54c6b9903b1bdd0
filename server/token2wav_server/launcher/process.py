"""Processes of one server: tritonserver and its engine. Starts them, drains them, stops them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path

from token2wav.config import load_server_config
from token2wav_server.front.build import native_front
from token2wav_server.launcher import reaper
from token2wav_server.launcher.access import Access
from token2wav_server.launcher.binaries import find_tritonserver
from token2wav_server.launcher.engine_process import EngineProcess
from token2wav_server.launcher.errors import ServerError, ServerStartError
from token2wav_server.launcher.log import LogPump, failure_reason, is_relevant, last_lines, show
from token2wav_server.launcher.memory import resident_mib
from token2wav_server.launcher.metrics_folder import VARIABLE as METRICS_VARIABLE
from token2wav_server.launcher.metrics_folder import MetricsFolder
from token2wav_server.launcher.ports import (
    LOOPBACK,
    Ports,
    bracketed,
    client_host,
    fetched,
    reserved,
)
from token2wav_server.launcher.repository import (
    has_front,
    has_python_models,
    models_in,
    prepare,
    selected,
    usual_models,
)
from token2wav_server.model_process import (
    CANARY_VARIABLE,
    DRAIN_VARIABLE,
    ENGINE_VARIABLE,
    SUMMARY,
)

_REPOSITORY = Path(__file__).resolve().parents[1] / "model_repository"
# Time from SIGTERM to SIGKILL, in which clients can read the audio of utterances that have ended.
_GRACE_S = 8.0
# The same time for a server without utterances. Triton 2.51 waits for every gRPC stream that a
# client keeps open, even without a request on it, and never closes such a stream. So the server has
# to be killed. The models are unloaded after 1.1 s, unless a gRPC stream that was used keeps them
# loaded; in either case they have no utterance.
_IDLE_GRACE_S = 2.0
_EXIT_TIMEOUT_S = 10  # longer than the grace period, because Triton logs an error after this time
# Least interval of the pings of a client that waits for its language model. Triton closes
# connections that ping more often, such as floods of pings. Its own default is 5 minutes.
_PING_INTERVAL_MS = 1000
_GRPC_VARIABLE = "TOKEN2WAV_GRPC"  # names the gRPC endpoint for models that are its clients
_POLL_S = 0.05
_SAID_EVERY_S = 10.0  # interval of the lines about a start that takes long
_CRASHES = (128 + signal.SIGABRT, 128 + signal.SIGSEGV)
_DRAIN_POLL_S = 0.1
_SECRET_BYTES = 32
_LONGEST_PARENT = 70  # bytes of the path of the folder with the run folder


class TritonServer:
    """Server for one model folder, of tritonserver and an engine; use it as a context manager.

    The engine is the process with the model (`token2wav_server.engine`). It is started if Triton
    loads the model `token2wav`, which is its front.

    Entering the context starts the server, and waits until its models are loaded. Leaving it stops
    the server, and removes its processes, its shared memory and its temporary files. The same
    happens if this process ends in any other way.

    Args:
        model: model folder. The models of Triton read its path from the variable TOKEN2WAV_MODEL.
        config: settings file of the server, which the models read from TOKEN2WAV_CONFIG; None for
            the default settings. Then the variable is not set.
        model_repository: model repository of Triton; by default the one of this package.
        models: names of the models that Triton loads from the repository; none for `token2wav`, or
            for all models of a repository without it. With an ensemble Triton loads its stages.
        ports: ports to listen on; use ``Ports.free()`` if the numbers do not matter.
        access: TLS settings and admin key; by default no TLS, and a random key that is not
            published.
        log_file: file for all output of the server; by default the output is written to the stderr
            of this process.
        verbose: whether all output is written to stderr. If False, stderr gets only warnings,
            errors and lines that models print. A log file always gets all output.
        extra_args: further arguments for tritonserver. They must not disable HTTP or metrics, from
            which this class finds out when the server is ready.
        ready_timeout_s: seconds that loading the models may take.

    Attributes:
        grpc_url, http_url, metrics_url: HOST:PORT of each service, for clients on this machine.
        version: version of tritonserver; empty before the server has been ready.
        front: `native` or `python`; empty before the start, and without an engine.
        canary_name: secret client name of the canary, which the models read from an environment
            variable.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        config: Path | str | None = None,
        model_repository: Path | str | None = None,
        models: Sequence[str] = (),
        ports: Ports | None = None,
        host: str = "127.0.0.1",
        access: Access | None = None,
        log_file: Path | str | None = None,
        verbose: bool = True,
        extra_args: Sequence[str] = (),
        ready_timeout_s: float = 600.0,
    ) -> None:
        self.model = Path(model).resolve()
        # A link is not followed: voices are relative to it, and its target may be replaced.
        self.config = Path(config).absolute() if config is not None else None
        self.model_repository = Path(model_repository or _REPOSITORY).resolve()
        self.models = tuple(models) or usual_models(self.model_repository)
        self.ports = ports or Ports()
        self.host = host
        self.access = access or Access()
        self._log_file = Path(log_file) if log_file is not None else None
        self._verbose = verbose
        self._extra_args = list(extra_args)
        self._ready_timeout_s = ready_timeout_s
        self._reaper: subprocess.Popen[bytes] | None = None
        self._log: LogPump | None = None
        self._engine: EngineProcess | None = None
        self._metrics: MetricsFolder | None = None
        self._drain_file = Path()
        self._stop_grace_s = _GRACE_S
        self._inner = self.ports
        address = bracketed(client_host(host))
        self.grpc_url, self.http_url, self.metrics_url = (
            f"{address}:{port}" for port in (self.ports.grpc, self.ports.http, self.ports.metrics)
        )
        self.version = self.front = ""
        self.canary_name = secrets.token_urlsafe(_SECRET_BYTES)
        self._cleanup = contextlib.ExitStack()

    @property
    def pid(self) -> int:
        """Process id of tritonserver itself, which is the parent of the model processes."""
        reaper_pid = self._running().pid
        return int(Path(f"/proc/{reaper_pid}/task/{reaper_pid}/children").read_text().split()[0])

    @property
    def engine_pid(self) -> int:
        """Process id of the engine; 0 if no model of Triton needs it."""
        return 0 if self._engine is None else self._engine.pid

    @property
    def running(self) -> bool:
        """Whether the server was started and not stopped, even if it has ended by itself."""
        return self._reaper is not None

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server, and returns when all its models are ready.

        If the server crashes during the start (SIGABRT or SIGSEGV), it is started a second time.
        The same happens if another program takes a port of the loopback interface that was chosen
        for tritonserver. The second start chooses other ports.

        Raises:
            TritonNotFoundError: this machine has no usable tritonserver.
            PortInUseError: a port is taken.
            ServerStartError: the server ended or was not ready in time. The message gives the
                reason from its log.
        """
        if self._reaper is not None:
            raise ServerError("the server is already started: stop it first")
        if not self.model_repository.is_dir():
            raise ServerError(
                f"model repository {self.model_repository} is not a folder; name the folder "
                "with --model-repository"
            )
        for name in self.models:
            if not (self.model_repository / name).is_dir():
                names = ", ".join(models_in(self.model_repository))
                raise ServerError(f"models: {name!r} is not one of: {names}")
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
            self.stop(at_once=True)
            raise

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits until the server ends, and returns its exit status (128 + n after signal n); None
        if it still runs after ``timeout_s``.
        """
        try:
            return self._running().wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def restart_engine(self) -> None:
        """Restarts the engine alone, and returns when the front is connected to it.

        Ports and connections of clients stay open. Open utterances are lost.

        Raises:
            ServerStartError: the server has no engine; or the engine ended, or was not ready in
                time; or tritonserver ended meanwhile.
        """
        if self._engine is None:
            raise ServerStartError("the server has no engine")
        assert self._metrics is not None
        self._engine.kill()
        self._metrics.forget(self._engine.pid)
        self._engine = engine = self._start_engine()
        if self._wait_for(lambda: engine.is_connected) is not None:
            raise ServerStartError(f"tritonserver ended: {self.failure_reason()}")

    def engine_failure(self) -> str:
        """Returns why the engine has ended by itself; empty if it has not."""
        if self._engine is None or not self._engine.has_ended:
            return ""
        return self._engine.failure_reason()

    def memory_mib(self) -> int:
        """Returns the resident memory of all processes in MiB; 0 after the end of tritonserver."""
        try:
            return resident_mib(self.pid, self.engine_pid)
        except (OSError, IndexError):  # the server has ended
            return 0

    def batches(self) -> int:
        """Returns how many batches the models have computed."""
        assert self._metrics is not None
        return int(sum(self._metrics.values("token2wav_batch_streams_count")))

    def failure_reason(self) -> str:
        """Returns the reason why the server has ended."""
        assert self._log is not None
        self._log.join(timeout=2)
        return failure_reason([*self._log.lines], self.wait(timeout_s=0) if self.running else None)

    def drain(self, grace_s: float) -> int:
        """Drains the server: new utterances are refused, and open utterances may end.

        Triton alone cannot drain. After SIGTERM it lets open requests finish, but an utterance
        consists of many requests, and Triton refuses the next one. So this method creates a file,
        and the models refuse new utterances while the file exists. SIGTERM is sent later, by
        `stop`.

        Returns:
            The utterances that are lost, because they were still open after ``grace_s`` seconds, or
            when the server ended.
        """
        deadline = time.monotonic() + grace_s
        # The folder of the file is missing if the server has ended and the reaper has cleaned up.
        # On a full disk, utterances may still start, but open ones must not be lost.
        with contextlib.suppress(OSError):
            self._drain_file.touch()
        open_utterances = 0
        self._stop_grace_s = _IDLE_GRACE_S
        assert self._metrics is not None
        while True:
            # During this pause an utterance that was just admitted appears in the metrics.
            if self.wait(_DRAIN_POLL_S) is not None or self.engine_failure():
                return open_utterances
            # The gauge has one value for each part of the server that holds streams.
            open_utterances = int(max(self._metrics.values("token2wav_open_streams"), default=0))
            if open_utterances == 0:
                return 0
            self._stop_grace_s = _GRACE_S
            if time.monotonic() > deadline:
                return open_utterances

    def stop(self, *, at_once: bool = False) -> None:
        """Stops the server, and removes its processes, shared memory and files.

        It does nothing if the server is not running.

        Args:
            at_once: whether to stop without waiting for running requests, and for clients to
                disconnect.
        """
        if at_once and self._reaper is not None:
            self._reaper.send_signal(reaper.STOP_AT_ONCE)
        self._cleanup.close()

    def _launch(self) -> None:
        # Imported here, because model processes import this module too, and need no HTTP.
        from token2wav_server.launcher.front import Front

        shm_prefix = f"token2wav-{uuid.uuid4().hex[:12]}-"
        folder = _run_folder()
        self._cleanup.callback(setattr, self, "_reaper", None)
        self._cleanup.callback(reaper.remove_leftovers, folder, shm_prefix)
        self._stop_grace_s = _GRACE_S
        self._inner = Ports(self._reserve(), self.ports.grpc, self._reserve())
        (metrics := folder / "metrics").mkdir()
        self._metrics = MetricsFolder(metrics)
        self._cleanup.enter_context(
            Front(self.host, self.ports, self._inner, self.access, self._metrics)
        )
        names, repository = selected(self.model_repository, self.models), folder / "models"
        has_engine = has_front(self.model_repository, names)
        library = self._native_library() if has_engine else None
        prepare(self.model_repository, names, self.model, repository, library)
        triton = find_tritonserver(folder, python_models=has_python_models(repository))
        sink = sys.stderr
        if self._log_file is not None:
            sink = self._cleanup.enter_context(self._log_file.open("w", encoding="utf-8"))
        environment = triton.environment | {"TOKEN2WAV_MODEL": str(self.model)}
        self._drain_file = folder / "drain"
        environment[DRAIN_VARIABLE] = str(self._drain_file)
        environment[CANARY_VARIABLE] = self.canary_name
        environment[_GRPC_VARIABLE] = self.grpc_url
        environment[METRICS_VARIABLE] = str(metrics)
        environment.pop("TOKEN2WAV_CONFIG", None)
        if self.config is not None:
            environment["TOKEN2WAV_CONFIG"] = str(self.config)
        socket = folder / "engine.sock"
        environment[ENGINE_VARIABLE] = str(socket)
        shown = (lambda _: True) if self._verbose or self._log_file is not None else is_relevant
        self._engine = None
        if has_engine:
            self.front = "python" if library is None else "native"
            # The libraries of tritonserver must not take the place of those of this Python.
            libraries = {name: os.environ.get(name, "") for name in ("LD_LIBRARY_PATH", "PATH")}
            environment_of_engine = environment | libraries
            self._start_engine = partial(EngineProcess, socket, environment_of_engine, sink, shown)
            self._engine = self._start_engine()
            self._cleanup.callback(self._kill_engine)
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
            start_new_session=True,  # so that Ctrl-C in a terminal reaches only the launcher
        )
        self._cleanup.callback(self._stop_reaper, self._reaper)
        assert self._reaper.stdout is not None
        self._log = LogPump(self._reaper.stdout, sink, shown)
        self._log.start()

    def _kill_engine(self) -> None:
        assert self._engine is not None
        self._engine.kill()
        self._engine = None

    def _native_library(self) -> Path | None:
        """Returns the library of the native front, if the settings choose it."""
        front = load_server_config(self.config).server.front
        library = None if front == "python" else native_front()
        if front == "native" and library is None:
            raise ServerStartError(
                "server.front: native, but its library is not installed for this machine; install "
                "g++ and run `token2wav setup`, or choose auto or python"
            )
        return library

    def _server_arguments(self, repository: Path, backends: Path, shm_prefix: str) -> list[str]:
        return [
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--http-address={LOOPBACK}",
            f"--http-port={self._inner.http}",
            f"--grpc-address={bracketed(self.host)}",  # Triton only joins address and port
            f"--grpc-port={self.ports.grpc}",
            f"--grpc-http2-min-recv-ping-interval-without-data={_PING_INTERVAL_MS}",
            f"--metrics-address={LOOPBACK}",
            f"--metrics-port={self._inner.metrics}",
            f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
            "--disable-auto-complete-config",  # otherwise Triton loads every model.py twice
            *self.access.arguments(),
            *self._extra_args,
        ]

    def _become_ready(self, *, last: bool = False) -> bool:
        """Waits until all models are ready; returns False if the server crashed, or if an inner
        port is taken.

        Triton's Python backend sometimes aborts while a model starts on a busy machine, and starts
        normally the next time (seen with server 2.51: "lock_exception", in 1 of 200 starts).

        Another program can take an inner port between its choice and the end of the load: Triton
        listens only after it has loaded the models. For example, another server may be configured
        to listen on this port.

        Args:
            last: whether a crash, or a taken inner port, raises an error instead.

        Raises:
            ServerStartError: the server ended, or was not ready in time.
        """
        inner = self._inner
        # Both services are polled, because the metrics service starts last.
        status = self._wait_for(
            lambda: (
                fetched(inner.http, "/v2/health/ready") is not None
                and fetched(inner.metrics, "/metrics") is not None
            )
        )
        if status is not None:
            if not last and (status in _CRASHES or self._inner_port_is_taken()):
                return False
            raise ServerStartError(f"tritonserver could not start: {self.failure_reason()}")
        self.version = json.loads(fetched(inner.http, "/v2") or b"{}").get("version", "")
        return True

    def _wait_for(self, ready: Callable[[], bool]) -> int | None:
        """Waits until a condition holds, or tritonserver ends; then its exit status is returned.

        Raises:
            ServerStartError: the engine ended, or the time limit for loading the models is over.
        """
        assert self._log is not None
        began, said_s = time.monotonic(), 0.0
        while not ready():
            if (status := self.wait(timeout_s=_POLL_S)) is not None:
                return status
            if reason := self.engine_failure():
                raise ServerStartError(f"the server could not start: {reason}")
            elapsed_s = time.monotonic() - began
            if elapsed_s - said_s > _SAID_EVERY_S:
                said_s = elapsed_s
                show(f"{SUMMARY}not ready yet, after {elapsed_s:.0f} s", sys.stderr)
            if elapsed_s > self._ready_timeout_s:
                end_of_log = last_lines([*self._log.lines]) or "nothing"
                raise ServerStartError(
                    f"tritonserver was not ready after {self._ready_timeout_s:g} s: raise "
                    "the time limit, or read the full log (--verbose), which ends with: "
                    f"{end_of_log}"
                )
        return None

    def _reserve(self) -> int:
        """Reserves a free port of the loopback for tritonserver until the server is stopped."""
        port: int = self._cleanup.enter_context(reserved(LOOPBACK)).getsockname()[1]
        return self._reserve() if port in astuple(self.ports) else port

    def _inner_port_is_taken(self) -> bool:
        """Returns whether the server ended because another program listens on an inner port."""
        reason = self.failure_reason()
        return any(
            f"Socket '{LOOPBACK}:{port}' already in use" in reason
            for port in (self._inner.http, self._inner.metrics)
        )

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
            process.kill()  # for a reaper that hangs; the server ends with its reaper
            process.wait()
        if self._log is not None:
            self._log.join(timeout=2)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._reaper is None:
            raise ServerError("the server is not running: start it first")
        return self._reaper


def _run_folder() -> Path:
    """Makes the private folder of a server.

    It is in /tmp if the usual folder has a long path, because the path of a socket in it may have
    at most 107 bytes.
    """
    usual = Path(tempfile.gettempdir())
    parent = usual if len(os.fsencode(usual)) < _LONGEST_PARENT else Path("/tmp")
    return Path(tempfile.mkdtemp(prefix="token2wav-server-", dir=parent))
