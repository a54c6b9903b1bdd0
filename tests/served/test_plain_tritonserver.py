"""Triton without the launcher, as deploy/plain_tritonserver.sh runs it. A plugin marks audio."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from testkit.echo_mark import echoed
from testkit.models.golden import ROOT, TINY, GoldenSet
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.plugins import installed
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav import Token2Wav
from token2wav_client import Client, ClientVoice, ModelNotReadyError, ServerUnavailable
from token2wav_server.launcher.ports import Ports, fetched


def recipe(ports: Ports) -> str:
    script = (ROOT / "deploy" / "plain_tritonserver.sh").read_text(encoding="utf-8")
    assert "0.0.0.0" not in script, (
        "who calls is not asked: only this machine may, unless TOKEN2WAV_HOST says otherwise"
    )
    for port, free in (("8001", ports.grpc), ("8002", ports.metrics), ("8003", ports.http)):
        assert script.count(f"={port}") == 1
        script = script.replace(f"={port}", f"={free}")
    return script


@pytest.mark.python_models
def test_plain_tritonserver_serves_the_model(
    tmp_path: Path, golden: GoldenSet, voice: ClientVoice, model: Token2Wav
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("limits: {streams: 2}\nstream: {mark: Echo}\n")
    ports = Ports.free()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    some_shells_export = {"HOST": "nowhere.invalid"}
    (site := tmp_path / "site").mkdir()
    environment = os.environ | some_shells_export | {"PYTHONPATH": f"{site}:{ROOT}"}
    environment |= {"PATH": path, "MODEL": str(TINY), "CONFIG": str(config)}
    mark = "from testkit.echo_mark import Echo"
    with (
        installed(site, "a_mark", mark, "token2wav.audio_marks", ["Echo"]),
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            ["bash", "-c", recipe(ports)], cwd=tmp_path, env=environment, stdout=log, stderr=log
        ) as server,
    ):
        try:
            wait_until_healthy(f"127.0.0.1:{ports.grpc}", server)
            with Client(f"127.0.0.1:{ports.grpc}") as client:
                audio = np.concatenate(
                    [chunk.audio for chunk in client.synthesize([golden.tokens], voice)]
                )
            expected = echoed(model.synthesize(golden.tokens, golden.voice))
            assert np.abs(audio - expected).max() <= SERVER_EQUALS_LIBRARY
            metrics = fetched(ports.http, "/metrics")
            assert metrics is not None
            assert b'token2wav_streams_ended_total{reason="finished"}' in metrics
        finally:
            server.terminate()
            server.wait(PATIENCE_SECONDS)


def test_an_installation_of_triton_is_used(tmp_path: Path) -> None:
    """Its libraries need no path."""
    installation = tmp_path / "triton"
    (installation / "bin").mkdir(parents=True)
    program = installation / "bin" / "tritonserver"
    program.write_text('#!/bin/sh\necho "started $*"\n')
    program.chmod(0o755)
    (installation / "backends" / "python").mkdir(parents=True)
    (installation / "backends" / "python" / "triton_python_backend_stub").touch()
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TOKEN2WAV_TRITONSERVER": str(installation),
        "MODEL": str(TINY),
        "CONFIG": "",
    }
    run = subprocess.run(
        ["bash", "-c", recipe(Ports.free())],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert run.stdout.startswith("started --model-repository="), run.stderr
    assert f"--backend-directory={installation}/backends " in run.stdout


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with Client(url, connect_timeout_s=1.0) as client:
                client.health(timeout_s=PATIENCE_SECONDS)
            return
        except (ServerUnavailable, ModelNotReadyError):
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
