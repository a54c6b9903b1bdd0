"""Files of docker compose: pins, confinement, and the time that servers have to stop.

`make images-check` runs the images with these settings, and `make rehearsal` the services.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from testkit.rigs.container import (
    COMPOSE,
    WITH_BALANCER,
    WITH_HUB,
    WITH_MPS,
    defaults,
    read_compose,
)
from testkit.rigs.processes import finished
from token2wav_client.cli import health_parser
from token2wav_server.cli import parser as serve_parser

SERVERS = ("server", "server-cpu")
COMPOSE_WITH_RESET = (2, 24)
PROFILES = ("gpu", "cpu", "client", "speech", "language-model", "monitoring")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return read_compose(COMPOSE)


def _compose_command() -> list[str]:
    """Command of a Compose that knows the tag `!reset`, which the balancer's file needs."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            version = subprocess.run(
                [*command, "version", "--short"], capture_output=True, text=True, check=False
            )
            numbers = re.match(r"v?(\d+)\.(\d+)", version.stdout)
            if numbers and tuple(map(int, numbers.groups())) >= COMPOSE_WITH_RESET:
                return command
    pytest.skip("needs Docker Compose 2.24 or later")


@pytest.mark.parametrize(
    "files", [[COMPOSE], [COMPOSE, WITH_BALANCER], [COMPOSE, WITH_MPS], [COMPOSE, WITH_HUB]]
)
def test_docker_compose_accepts_the_files(files: list[Path]) -> None:
    command = _compose_command()
    options = [f"--file={file}" for file in files]
    options += [f"--profile={name}" for name in PROFILES]
    model = "mimi" if WITH_HUB in files else "/srv/model"
    environment = os.environ | {"TOKEN2WAV_MODEL": model}
    done = finished(*command, *options, "config", "--quiet", env=environment)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr


def test_variables_have_the_defaults_of_the_example_file() -> None:
    lines = COMPOSE.with_name(".env.example").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    content = "".join(file.read_text() for file in (COMPOSE, WITH_BALANCER, WITH_MPS, WITH_HUB))
    variables = re.findall(r"\$\{(\w+)(?::([-?])([^}]*))?\}", content)
    assert {name for name, _, _ in variables} == set(example) - {"COMPOSE_PROJECT_NAME"}
    for name, kind, default in variables:
        assert kind, f"{name} has no default and is not required"
        assert kind == "?" or default == example[name], f"{name}: differs from .env.example"


def test_with_a_name_no_service_mounts_it_as_a_folder(compose: dict[str, Any]) -> None:
    """A service of hub.yml without volumes keeps those of docker-compose.yml."""
    pulled = read_compose(WITH_HUB)["services"]
    mounts = {
        name: pulled.get(name, {}).get("volumes", service.get("volumes", []))
        for name, service in compose["services"].items()
    }
    folders = [name for name, volumes in mounts.items() if "TOKEN2WAV_MODEL:" in str(volumes)]
    assert folders == []
    readers = [name for name, volumes in mounts.items() if "models:/models:ro" in volumes]
    assert WITH_HUB.read_text().count("volumes: !override\n") == len(readers)
    for name in readers:
        assert pulled[name]["environment"].items() >= {
            ("HF_HOME", "/models"),
            ("HF_HUB_OFFLINE", "1"),
        }


def test_the_language_model_has_the_name_in_the_gateway(compose: dict[str, Any]) -> None:
    command = defaults(compose["services"]["language-model"]["command"]).split()
    settings = yaml.safe_load(COMPOSE.with_name("gateway.yaml").read_text())
    served = command[command.index("--served-model-name") + 1]
    assert served == settings["language_model"]["model"]


@pytest.mark.parametrize("file", [COMPOSE, WITH_BALANCER])
def test_docker_waits_until_a_server_has_stopped(file: Path) -> None:
    services = read_compose(file)["services"]
    for name in SERVERS:
        task, *options = services[name]["command"]
        assert task == "serve"
        parsed = serve_parser().parse_args(["m", *options])
        stopping = parsed.notice_seconds + parsed.grace_seconds
        assert float(services[name]["stop_grace_period"].removesuffix("s")) >= stopping + 10


def test_a_health_check_ends_before_its_timeout(compose: dict[str, Any]) -> None:
    """`tests/served/test_entrypoint.py` runs it."""
    for name in SERVERS:
        check = compose["services"][name]["healthcheck"]
        parsed = health_parser().parse_args(check["test"][3:])
        assert int(check["timeout"].removesuffix("s")) > parsed.timeout


def test_containers_are_confined(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if name != "language-model":  # its image runs as root, and writes into itself
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        assert service.get("user", "") not in ("0", "root", "0:0"), name
        assert "max-size" in service["logging"]["options"], name
        for port in service.get("ports", []):
            assert defaults(port).startswith("127.0.0.1:"), (
                f"{name}: {port} is open to the network by default"
            )
        runs_from = service.get("environment", {}).get("TRITON_CACHE_DIR")
        for path, _, options in (folder.partition(":") for folder in service.get("tmpfs", [])):
            exec_flag = "exec" if path == runs_from else "noexec"
            assert {exec_flag, "nosuid", "nodev"} <= set(options.split(",")), f"{name}: {path}"
    for name in SERVERS:
        assert compose["services"][name]["restart"] == "unless-stopped"


def test_images_are_pinned(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert re.search(r":v?\d+\.\d+\.\d+(-cpu)?$", defaults(service["image"])), service["image"]
