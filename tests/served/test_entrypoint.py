"""Entry point of the image with a real server, from start to drain, and its metrics."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from testkit.models.golden import TINY, GoldenSet
from testkit.rigs.container import (
    DOCKER,
    ENTRYPOINT,
    confined,
    image_environment,
    ngc_installation,
    why_not_confined,
)
from testkit.rigs.metrics import page
from testkit.rigs.processes import Program, finished
from testkit.rigs.queries import Query, queries, unknown
from testkit.rigs.serve_command import Speaker, speak
from token2wav_client import Client, ClientError, ClientVoice
from token2wav_server.launcher.ports import Ports

TOKENS = 100


@dataclass(frozen=True)
class Life:
    """Observations of one container.

    Attributes:
        lines: lines that the container printed.
        unconfined: reason why the container was not confined; empty if it was.
        user: user and group ids, capabilities and no-new-privileges flag of the model's process.
        health: result of the compose file's health check.
        metrics: metrics at the end.
        speaker: stream that was open when the container got the signal to stop.
        exit_code: exit code of the container.
    """

    lines: list[str]
    unconfined: str
    user: dict[str, str]
    health: subprocess.CompletedProcess[str]
    metrics: str
    speaker: Speaker
    exit_code: int


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory, golden: GoldenSet, voice: ClientVoice) -> Life:
    folder = tmp_path_factory.mktemp("container")
    folder.chmod(0o755)  # for the user in the container
    installation = ngc_installation(folder / "tritonserver")
    engines = folder / "engines"
    (engines / "another-gpu_1.0_tensorrt-1.0").mkdir(parents=True)
    ports = Ports.free()
    compose = yaml.safe_load((DOCKER / "docker-compose.yml").read_text())
    server = compose["services"]["server"]
    numbers = [
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
    ]
    environment = image_environment(installation) | {
        "TOKEN2WAV_MODEL_FOLDER": str(TINY),
        "TOKEN2WAV_ENGINES_FOLDER": str(engines),
        "TOKEN2WAV_HOST": "127.0.0.1",
    }
    command = [str(ENTRYPOINT), *server["command"], *numbers]
    if unconfined := why_not_confined():
        environment["TOKEN2WAV_ENGINES_LINK"] = str(folder / "link")
    else:
        command = [*confined(folder), *command]
    with Program.run(command, environment=environment) as container:
        container.wait_for_line("token2wav: ready, ")
        url = f"127.0.0.1:{ports.grpc}"
        with Client(url) as client, pytest.raises(ClientError, match="outside the vocabulary"):
            list(client.synthesize([[9999]], voice))
        health = _health(server["healthcheck"]["test"], ports, environment)
        [speaker] = speak(url, voice, golden.tokens[:TOKENS], streams=1)
        metrics = page(f"127.0.0.1:{ports.metrics}")
        user = _status(container.process.pid)
        container.process.send_signal(signal.SIGTERM)
        speaker.join()
        exit_code = container.wait()
    return Life(container.printed, unconfined, user, health, metrics, speaker, exit_code)


def _health(
    test: list[str], ports: Ports, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    assert test[0] == "CMD"
    program = shutil.which(test[1], path=environment["PATH"])
    assert program, f"{test[1]} is not on the image's PATH"
    arguments = [word.replace(f":{Ports.grpc}", f":{ports.grpc}") for word in test[2:]]
    return finished(program, *arguments, env=environment)


def _status(process: int) -> dict[str, str]:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_finds_the_folder_of_its_own_engines(life: Life) -> None:
    [line] = [
        line for line in life.lines if line.startswith("entrypoint: engines of this machine: ")
    ]
    assert re.search(
        r"/engines/(cpu-\w+_onnx-[\d.]+|[\w.-]+_\d+\.\d_tensorrt\w*-[\d.]+|none)$", line
    ), line


def test_runs_without_privileges(life: Life) -> None:
    if life.unconfined:
        pytest.skip(
            f"to be confined like a container, a process needs root and unshare: {life.unconfined}"
        )
    assert life.user["Uid"].split() == ["10001"] * 4
    assert life.user["NoNewPrivs"] == "1"
    assert {life.user[kind] for kind in ("CapEff", "CapPrm", "CapBnd", "CapInh")} == {"0" * 16}


def test_health_check(life: Life) -> None:
    assert life.health.returncode == 0, life.health.stderr


def test_sigterm_lets_streams_end(life: Life) -> None:
    assert life.exit_code == 0, life.lines
    assert any("draining" in line for line in life.lines)
    assert life.speaker.audio is not None, life.speaker.error
    assert life.speaker.audio.shape == (960 * TOKENS,)
    assert np.isfinite(life.speaker.audio).all()


@pytest.mark.parametrize("query", queries(gateway=False), ids=str)
def test_queries_name_exported_metrics(query: Query, life: Life) -> None:
    assert not unknown(query, life.metrics)


def test_variable_of_the_dashboard(life: Life) -> None:
    [variable] = json.loads((DOCKER / "grafana/dashboards/token2wav.json").read_text())[
        "templating"
    ]["list"]
    [metric] = re.findall(r"^label_values\((\w+), instance\)$", variable["query"]["query"])
    assert f"\n{metric}{{" in life.metrics
