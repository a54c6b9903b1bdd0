from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from ast import literal_eval
from pathlib import Path

import pytest

from token2wav_server import PortInUseError, Ports, ServerError, ServerStartError, TritonServer

from .traces import Traces


def test_serves_and_leaves_nothing_behind(
    repository: Path, tmp_path: Path, private_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN2WAV_CONFIG", "of somebody else")
    log = tmp_path / "server.log"
    server = TritonServer(tmp_path, model_repository=repository, ports=Ports.free(), log_file=log)
    with server:
        traces = Traces.of(server.pid)
        assert len(traces.processes) == 3, "guard, tritonserver and one stub"
        assert len(traces.folders) >= 2, "a backend folder of another server may be among them"
        assert len(traces.remaining()) == 4 + len(traces.folders), "one segment, and all of those"
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


def test_model_that_fails_to_load(
    failing_repository: Path, tmp_path: Path, private_temporary_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = TritonServer(tmp_path, model_repository=failing_repository, ports=Ports.free(), verbose=False)
    with pytest.raises(ServerStartError) as failure:
        server.start()
    assert str(failure.value) == (
        "tritonserver could not start: "
        "model 'echo' failed to load: ValueError: hop of 7 tokens: must be a multiple of 25"
    )
    assert "NVML" not in capfd.readouterr().err
    assert list(private_temporary_folder.iterdir()) == []


def test_model_that_takes_too_long(repository: Path, tmp_path: Path, private_temporary_folder: Path) -> None:
    server = TritonServer(tmp_path, model_repository=repository, ports=Ports.free(), ready_timeout_s=0)
    with pytest.raises(ServerStartError, match="not ready after 0 s"):
        server.start()
    assert list(private_temporary_folder.iterdir()) == []


def test_server_that_dies(repository: Path, tmp_path: Path) -> None:
    with TritonServer(tmp_path, model_repository=repository, ports=Ports.free()) as server:
        traces = Traces.of(server.pid)
        assert server.wait(timeout_s=0) is None
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(timeout_s=5) == 128 + signal.SIGKILL
        assert traces.remaining() == []


def test_model_process_that_dies(repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Triton itself would go on, and say that it is ready."""
    with TritonServer(tmp_path, model_repository=repository, ports=Ports.free(), verbose=False) as server:
        traces = Traces.of(server.pid)
        os.kill(traces.processes[2], signal.SIGKILL)
        assert server.wait(timeout_s=5) == 128 + signal.SIGKILL
        assert server.failure_reason() == "the model process was killed by signal SIGKILL"
        assert traces.remaining() == []
    assert capfd.readouterr().err == "", "the reason is for whoever asks"


def test_stop_at_once(repository: Path, tmp_path: Path) -> None:
    """Not even a server that hangs takes time."""
    with TritonServer(tmp_path, model_repository=repository, ports=Ports.free()) as server:
        traces = Traces.of(server.pid)
        for process in traces.processes[1:]:
            os.kill(process, signal.SIGSTOP)
        began = time.monotonic()
        server.stop(at_once=True)
        assert time.monotonic() - began < 3
    assert traces.remaining() == []


def test_launcher_that_is_killed(repository: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time; from token2wav_server import Ports, TritonServer\n"
        f"with TritonServer('.', model_repository={str(repository)!r}, ports=Ports.free()) as server:\n"
        "    print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        traces = Traces.of(int(launcher.stdout.readline()))
        launcher.kill()
    assert traces.remaining_after(5) == []


def test_guard_that_is_killed(repository: Path, tmp_path: Path) -> None:
    with TritonServer(tmp_path, model_repository=repository, ports=Ports.free()) as server:
        traces = Traces.of(server.pid)
        os.kill(traces.processes[0], signal.SIGKILL)
        assert server.wait(timeout_s=5) == -signal.SIGKILL
    assert traces.remaining_after(5) == []


@pytest.mark.parametrize("service", ["http", "grpc", "metrics"])
def test_port_in_use(service: str, repository: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = Ports(**{**vars(Ports.free()), service: port})
        started = time.monotonic()
        with pytest.raises(PortInUseError, match=f"{service} port {port} on 127.0.0.1 .*Address already in use"):
            TritonServer(tmp_path, model_repository=repository, ports=ports).start()
        assert time.monotonic() - started < 0.5


def test_same_port_twice() -> None:
    port = Ports.free().http
    with pytest.raises(PortInUseError, match=f"grpc port {port}"):
        Ports(port, port, port + 1).check_free("127.0.0.1")


def test_port_out_of_range() -> None:
    with pytest.raises(PortInUseError, match=r"65536 .*between 1 and 65535"):
        Ports(http=65536).check_free("127.0.0.1")


def test_missing_model_repository(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="nowhere is not a folder"):
        TritonServer(tmp_path, model_repository=tmp_path / "nowhere").start()
