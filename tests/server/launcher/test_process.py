from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from ast import literal_eval
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.network import needs_ipv6
from testkit.rigs.processes import suspend
from testkit.rigs.traces import Traces
from token2wav_server import PortInUseError, Ports, ServerError, ServerStartError, TritonServer
from token2wav_server.launcher import reaper
from token2wav_server.launcher.engine_process import EngineProcess
from token2wav_server.launcher.ports import reserved

# Most of the tests run a small Python model.
pytestmark = pytest.mark.python_models
# Looks for dead model processes a second after the server has ended.
SLOW_REAPER = """
import importlib.util, os, sys, time

spec = importlib.util.spec_from_file_location("reaper", {reaper!r})
reaper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reaper)
dead_stubs = reaper._dead_stubs

def dead_stubs_later(parent_pid):
    if parent_pid == os.getpid():
        time.sleep(1)
    return dead_stubs(parent_pid)

reaper._dead_stubs = dead_stubs_later
launcher_pid, folder, shm_prefix, grace_s, *command = sys.argv[1:]
sys.exit(reaper.run(int(launcher_pid), reaper.Path(folder), shm_prefix, float(grace_s), command))
"""


def test_a_settings_file_that_is_a_link_is_read_through_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its voices are relative to the link, and Kubernetes replaces the target of the link."""
    (tmp_path / "server.yaml").symlink_to("elsewhere/server.yaml")
    monkeypatch.chdir(tmp_path)
    assert TritonServer(".", config="server.yaml").config == tmp_path / "server.yaml"


def test_the_engine_executes_nothing_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory may be the model folder."""
    for name in ("torch", "runpy", "token2wav"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('executed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKEN2WAV_MODEL", raising=False)
    engine = EngineProcess(tmp_path / "engine.sock", os.environ, sys.stderr, lambda _: True)
    assert "TOKEN2WAV_MODEL: not set" in engine.failure_reason()


def test_serves_and_leaves_nothing_behind(
    repository: Path,
    tmp_path: Path,
    private_temporary_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKEN2WAV_CONFIG", "of somebody else")
    log = tmp_path / "server.log"
    server = TritonServer(tmp_path, model_repository=repository, ports=Ports.free(), log_file=log)
    with server:
        # a further folder, as a killed backend leaves it
        tempfile.mkdtemp(prefix="python_env_", dir="/tmp")
        traces = Traces.of(server.pid)
        assert len(traces.processes) == 3, "reaper, tritonserver and one stub"
        left = [name for name in traces.remaining() if "python_env_" not in name]
        assert len(left) == 5, "one segment, its own folder, and all of those"
        with urllib.request.urlopen(f"http://{server.metrics_url}/metrics") as metrics:
            assert b"nv_inference_count" in metrics.read()
        started = literal_eval((tmp_path / "started.txt").read_text())
        assert started == [sys.prefix, str(tmp_path), None], "the stub uses this environment"
        with pytest.raises(ServerError, match="already started"):
            server.start()
    assert traces.remaining() == []
    assert list(private_temporary_folder.iterdir()) == []
    assert "successfully loaded 'echo'" in log.read_text()
    server.stop()
    with pytest.raises(ServerError, match="not running"):
        _ = server.pid


def test_the_end_of_one_server_keeps_the_resources_of_another(
    repository: Path, tmp_path: Path
) -> None:
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    first, second = (
        TritonServer(tmp_path, model_repository=repository, ports=Ports.free(), log_file=log)
        for log in logs
    )
    with first, second:
        os.kill(first.pid, signal.SIGKILL)  # the reaper of the server cleans up
        assert first.wait(PATIENCE_SECONDS) == 128 + signal.SIGKILL
    assert "terminate called" not in logs[1].read_text(), (
        "a server that misses its backend folder aborts"
    )


def test_model_that_fails_to_load(
    failing_repository: Path,
    tmp_path: Path,
    private_temporary_folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = TritonServer(
        tmp_path, model_repository=failing_repository, ports=Ports.free(), verbose=False
    )
    with pytest.raises(ServerStartError) as failure:
        server.start()
    assert str(failure.value) == (
        "tritonserver could not start: "
        "model 'echo' failed to load: ValueError: hop of 7 tokens: must be a multiple of 25"
    )
    assert "NVML" not in capfd.readouterr().err
    assert list(private_temporary_folder.iterdir()) == []


def test_a_crash_while_it_starts_costs_a_second_try(
    crashing_repository: Callable[[int], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Triton's Python backend sometimes crashes at its start."""
    with TritonServer(
        tmp_path, model_repository=crashing_repository(1), ports=Ports.free(), verbose=False
    ) as server:
        assert server.wait(timeout_s=0) is None
    assert capfd.readouterr().err.count("killed by SIGABRT; trying once more\n") == 1


def test_two_crashes_are_reported_without_a_model_process_that_ends_later(
    crashing_repository: Callable[[int], Path],
    tmp_path: Path,
    private_temporary_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine, it may end before the reaper looks for the reason."""
    slow = tmp_path / "slow_reaper.py"
    slow.write_text(SLOW_REAPER.format(reaper=reaper.__file__))
    monkeypatch.setattr(reaper, "__file__", str(slow))
    server = TritonServer(
        tmp_path, model_repository=crashing_repository(9), ports=Ports.free(), verbose=False
    )
    with pytest.raises(
        ServerStartError, match="could not start: tritonserver was killed by SIGABRT"
    ):
        server.start()
    assert (tmp_path / "starts").read_text() == ".."
    assert list(private_temporary_folder.iterdir()) == []


def test_model_that_takes_too_long(
    repository: Path, tmp_path: Path, private_temporary_folder: Path
) -> None:
    server = TritonServer(
        tmp_path, model_repository=repository, ports=Ports.free(), ready_timeout_s=0
    )
    with pytest.raises(ServerStartError, match="not ready after 0 s"):
        server.start()
    assert list(private_temporary_folder.iterdir()) == []


def test_model_process_that_dies(
    repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Triton itself would go on, and report that it is ready."""
    with TritonServer(
        tmp_path, model_repository=repository, ports=Ports.free(), verbose=False
    ) as server:
        traces = Traces.of(server.pid)
        os.kill(traces.processes[2], signal.SIGKILL)
        # Triton ends with SIGABRT if it aborts before the reaper can end it. It aborts because the
        # process died in the middle of an access to shared memory.
        assert server.wait(PATIENCE_SECONDS) in (128 + signal.SIGABRT, 128 + signal.SIGKILL)
        assert server.failure_reason() == "the model process was killed by signal SIGKILL"
        assert traces.remaining() == []
        assert server.drain(1.0) == 0
    assert capfd.readouterr().err == "", "the reason is for whoever asks"


def test_a_drain_needs_no_room_on_the_disk(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with TritonServer(tmp_path, model_repository=repository, ports=Ports.free()) as server:
        monkeypatch.setattr(Path, "touch", full)
        assert server.drain(1.0) == 0


def test_stop_at_once(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a server that hangs is stopped without a wait."""
    monkeypatch.setattr("token2wav_server.launcher.process._GRACE_S", 2 * PATIENCE_SECONDS)
    with TritonServer(tmp_path, model_repository=repository, ports=Ports.free()) as server:
        traces = Traces.of(server.pid)
        for process in traces.processes[1:]:
            suspend(process)
        began = time.monotonic()
        server.stop(at_once=True)
        assert time.monotonic() - began < PATIENCE_SECONDS
    assert traces.remaining() == []


def test_launcher_that_is_killed(repository: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time; from token2wav_server import Ports, TritonServer\n"
        f"with TritonServer('.', model_repository={str(repository)!r}, ports={Ports.free()!r}) as "
        f"server:\n"
        "    print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        traces = Traces.of(int(launcher.stdout.readline()))
        launcher.kill()
    assert traces.remaining_after(PATIENCE_SECONDS) == []


def test_reaper_that_is_killed(repository: Path, tmp_path: Path) -> None:
    with TritonServer(tmp_path, model_repository=repository, ports=Ports.free()) as server:
        traces = Traces.of(server.pid)
        # a model process that hangs does not notice its server's end
        suspend(traces.processes[2])
        os.kill(traces.processes[0], signal.SIGKILL)
        assert server.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        assert (
            server.failure_reason()
            == "the reaper, which is the parent of tritonserver, was killed by SIGKILL"
        )
    assert traces.remaining() == []


@needs_ipv6
def test_ipv6(repository: Path, tmp_path: Path) -> None:
    ports = Ports.free("::")
    with TritonServer(tmp_path, model_repository=repository, host="::", ports=ports):
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, ports.grpc)).close()


def test_port_in_use(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before any process is started."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = replace(Ports.free(), metrics=(port := taken.getsockname()[1]))
        with pytest.raises(
            PortInUseError, match=f"metrics port {port} on 127.0.0.1 .*Address already in use"
        ):
            TritonServer(tmp_path, model_repository=repository, ports=ports).start()


@pytest.mark.parametrize("service", [0, 1], ids=["http", "metrics"])
def test_a_taken_inner_port_costs_a_second_try(
    service: int,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Another server listens on a port that was chosen for tritonserver and not used yet."""
    chosen = list[socket.socket]()
    with contextlib.ExitStack() as stack:

        def reserve_and_lose(host: str) -> socket.socket:
            chosen.append(reserved(host))
            if len(chosen) == service + 1:
                stack.enter_context(socket.create_server(chosen[-1].getsockname()))
            return chosen[-1]

        monkeypatch.setattr("token2wav_server.launcher.process.reserved", reserve_and_lose)
        with TritonServer(
            tmp_path, model_repository=repository, ports=Ports.free(), verbose=False
        ) as server:
            assert server.wait(timeout_s=0) is None
            with urllib.request.urlopen(f"http://{server.http_url}/v2/health/ready") as health:
                assert health.status == 200
    assert capfd.readouterr().err.count("already in use; trying once more\n") == 1
    assert len(chosen) == 4


def test_ports_that_cannot_be() -> None:
    port = Ports.free().http
    for ports, message in (
        (Ports(port, port, port + 1), f"grpc port {port}"),
        (Ports(http=65536), "65536 .*between 1 and 65535"),
    ):
        with pytest.raises(PortInUseError, match=message):
            ports.check_free("127.0.0.1")
