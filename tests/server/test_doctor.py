"""Command `token2wav doctor`: what each check finds, on this machine and on broken ones."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from testkit.models.golden import TINY
from testkit.tables import table
from tests.served.test_faults_shm import with_shm
from tests.test_commands import run_without
from token2wav.commands import main
from token2wav.execution import cuda_facts, device
from token2wav_server import doctor, gpu_findings
from token2wav_server.findings import Finding, examine
from token2wav_server.model_findings import examine_model

PYTHONS = table(
    """
3.9  | linux  | error | 3.9: a server needs Python 3.10 to 3.14
3.10 | linux  | ok    | 3.
3.14 | linux  | ok    | 3.
3.15 | linux  | error | make a virtual environment
3.12 | darwin | error | darwin: a server needs Linux
"""
)
# compute capability of a GPU, and the architectures of a torch
ARCHITECTURES = table(
    """
9.0  | sm_80 sm_90            | yes
9.0  | sm_90a                 | yes
8.9  | sm_80 sm_86 sm_90      | yes
8.6  | sm_89                  | no
12.0 | sm_80 sm_90            | no
12.0 | sm_90 compute_90       | yes
7.5  | sm_80 compute_80       | no
12.1 | sm_100 sm_120          | yes
"""
)


@pytest.mark.parametrize(("version", "system", "state", "part"), PYTHONS)
def test_python(version: str, system: str, state: str, part: str) -> None:
    major, minor = map(int, version.split("."))
    finding = doctor.python((major, minor), system)
    assert finding.state == state
    assert part in finding.message


@pytest.mark.parametrize(
    ("library", "state", "part"),
    [(Path("a.so"), "ok", "native, a.so"), (None, "warning", "install g++ and run")],
)
def test_front(
    library: Path | None, state: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "native_front", lambda: library)
    finding = doctor.front()
    assert finding.state == state
    assert part in finding.message


@pytest.mark.parametrize(("capability", "architectures", "runs"), ARCHITECTURES)
def test_a_gpu_needs_code_for_it(capability: str, architectures: str, runs: str) -> None:
    major, minor = map(int, capability.split("."))
    assert gpu_findings.runs_on((major, minor), architectures.split()) == (runs == "yes")


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The H200 of the table is foreign to a torch that was made for older GPUs only."""
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H200",
        "mem_get_info": (100 << 20, 143771 << 20),
        "get_arch_list": ["sm_75", "sm_80"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    *_, finding = gpu_findings.gpus()
    assert (finding.check, finding.state) == ("gpu 0", "error")
    assert finding.message.startswith(
        "NVIDIA H200, compute capability 9.0, 100 of 143,771 MiB free: this torch has no code"
    )
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    assert [finding.state for finding in gpu_findings.gpus()] == ["ok", "ok", "ok"]


def test_a_gpu_that_admits_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: torch.device) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nmore lines")

    monkeypatch.setattr(torch.cuda, "get_device_capability", refused)
    finding = gpu_findings.gpu(torch.device("cuda", 1))
    assert (finding.check, finding.state) == ("gpu 1", "error")
    assert finding.message == (
        "CUDA error: all CUDA-capable devices are busy; check it with nvidia-smi"
    )


def test_a_driver_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda_facts, "missing_gpu", lambda: "driver 535.1, but CUDA 13.0")
    *_, finding = gpu_findings.gpus()
    assert finding.state == "warning"
    assert finding.message.startswith("driver 535.1, but CUDA 13.0, so models run on the CPU; ")


@pytest.mark.parametrize(
    ("size", "state"), [("256k", "error"), ("8m", "warning"), ("100m", "ok"), ("none", "error")]
)
def test_shared_memory(size: str, state: str, tmp_path: Path) -> None:
    if size == "none":
        assert doctor.shared_memory(tmp_path / "none").state == state
        return
    code = "from token2wav_server.doctor import shared_memory; print(shared_memory().state)"
    done = subprocess.run(
        [*with_shm(size), sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr:
        pytest.skip("a small /dev/shm needs the right to mount one")
    assert done.stdout == f"{state}\n", done.stderr


def test_no_tritonserver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.triton_server().message.endswith("/tritonserver")
    monkeypatch.setenv("TOKEN2WAV_TRITONSERVER", str(tmp_path))
    [finding] = examine({"triton server": doctor.BEFORE_START["triton server"]})
    assert finding.state == "error"
    assert "correct or unset the variable" in finding.message


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    assert doctor.cache().message.startswith(str(tmp_path / "cache"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "file" / "cache"))
    finding = doctor.cache()
    assert finding.state == "warning"
    assert "set HF_HOME to another folder" in finding.message


@pytest.mark.parametrize(
    ("now", "reading", "state", "part"),
    [
        (time.time, time.monotonic, "ok", "µs a reading"),
        (time.time, lambda: time.sleep(2e-6), "warning", "boot with the clock source tsc"),
        (lambda: 0.0, time.monotonic, "error", "1970-01-01 is before this program was installed"),
    ],
)
def test_clock(
    now: Callable[[], float], reading: Callable[[], float], state: str, part: str
) -> None:
    finding = doctor.clock(now, reading)
    assert finding.state == state
    assert part in finding.message


@pytest.mark.parametrize(
    ("settings", "state", "part"),
    [
        ("{}", "ok", "; limits.streams is 64"),
        ("limits: {streams: 9000}", "warning", "but limits.streams is 9000; lower it, or bound"),
        ("runtime: {backend: pause}", "warning", "sends a test signal in place of speech"),
        ("stream: {max_hop_tokens: 30}", "error", "stream.max_hop_tokens: 30 is not a multiple"),
    ],
)
def test_a_model_with_its_settings(
    settings: str, state: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "available_bytes", lambda: 16 << 30)
    (tmp_path / "server.yaml").write_text(settings)
    *_, finding = model_findings(TINY, tmp_path / "server.yaml")
    assert finding.state == state, finding
    assert part in finding.message


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_bytes", lambda: 1 << 20)
    *_, finding = model_findings(TINY, None)
    assert finding.state == "error"
    assert finding.message.startswith("the weights take 3 MiB, but 1 MiB are free on cpu; ")


def test_json_and_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--json", f"--metrics-port={port}"]) == 3
    findings = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"python", "packages", "torch", "triton server", "shared memory", "clock"} <= set(
        findings
    )
    assert findings["ports"]["state"] == "error"


def test_without_torch() -> None:
    done = run_without("torch", ["doctor", "--json"])
    assert done.returncode == 3, done.stderr
    errors = [row for row in json.loads(done.stdout) if row["state"] == "error"]
    assert {
        "check": "packages",
        "state": "error",
        "message": "torch: missing; run: pip install 'token2wav[server]'",
    } in errors


def model_findings(folder: Path, config: Path | None) -> list[Finding]:
    return list(examine({"model": lambda: examine_model(folder, config)}))
