"""docker-compose.yml against the project: paths, ports, variables, commands and confinement."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.container import DOCKER, ENTRYPOINT
from token2wav.config import load_server_config
from token2wav_client import cli as client_cli
from token2wav_server import cli as server_cli
from token2wav_server.launcher.ports import Ports

COMPOSE = DOCKER / "docker-compose.yml"
SERVERS = ("server", "server-cpu")
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return document


@pytest.fixture(scope="module")
def example() -> dict[str, str]:
    """Returns the variables of .env.example."""
    lines = (DOCKER / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def defaults(text: str) -> str:
    """Returns a value with all variables unset."""
    return _VARIABLE.sub(lambda found: found[3] if found[2] == "-" else "", text)


def test_compose_accepts_it() -> None:
    environment = os.environ | {"TOKEN2WAV_MODEL": "/srv/model"}
    for command in (["docker", "compose"], ["docker-compose"]):
        program = shutil.which(command[0])
        if (
            program
            and not subprocess.run(
                [*command, "version"], capture_output=True, check=False
            ).returncode
        ):
            break
    else:
        pytest.skip("needs docker compose, or: apt-get install docker-compose")
    profiles = [f"--profile={name}" for name in ("gpu", "cpu", "client", "monitoring")]
    done = subprocess.run(
        [*command, "--file", str(COMPOSE), *profiles, "config", "--quiet"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr


def test_variables_are_those_of_the_example(example: dict[str, str]) -> None:
    found = _VARIABLE.findall(COMPOSE.read_text())
    assert {name for name, _, _ in found} == set(example) - {"COMPOSE_PROJECT_NAME"}
    for name, kind, default in found:
        assert kind, f"{name} has no default and is not required"
        if kind == "-":
            assert default == example[name], f"{name}: the default differs from .env.example"


def test_pages_name_a_profile_for_what_has_none_by_default(compose: dict[str, Any]) -> None:
    assert all(service["profiles"] for service in compose["services"].values())
    pages = [DOCKER.parent / "README.md", *(DOCKER.parent / "docs").glob("*.md")]
    commands = [
        line
        for page in pages
        for line in re.findall(r"docker compose.* (?:build|up)\b.*", page.read_text())
    ]
    assert commands
    assert all("--profile" in command for command in commands), commands


def test_what_is_mounted_exists(compose: dict[str, Any]) -> None:
    made_by_the_operator = {"files", "grafana_password"}
    sources = [
        defaults(volume).split(":")[0]
        for service in compose["services"].values()
        for volume in service["volumes"]
    ]
    secrets = [defaults(secret["file"]) for secret in compose["secrets"].values()]
    for source in (*sources, *secrets):
        if source.startswith("."):
            assert (DOCKER / source).exists() or Path(source).name in made_by_the_operator, source
        else:
            assert source in ("", *compose["volumes"]), source


def test_containers_see_what_the_entry_point_looks_for(compose: dict[str, Any]) -> None:
    expected = set(re.findall(r":-(/[\w./]+)}", ENTRYPOINT.read_text()))
    assert expected == {"/model", "/engines", "/run/token2wav/engines"}
    settings = "/opt/token2wav/docker/server.yaml"
    for name, targets in (
        ("engines", {"/model": "ro", settings: "ro", "/engines": "rw"}),
        ("server", {"/model": "ro", settings: "ro", "/engines": "ro"}),
        ("server-cpu", {"/model": "ro", settings: "ro"}),
    ):
        mounts = [defaults(volume).split(":") for volume in compose["services"][name]["volumes"]]
        assert {mount[1]: mount[2] if len(mount) > 2 else "rw" for mount in mounts} == targets


def test_settings_point_at_the_link_of_the_entry_point() -> None:
    [link] = re.findall(r"ENGINES_LINK:-([\w./]+)}", ENTRYPOINT.read_text())
    assert load_server_config(DOCKER / "server.yaml").runtime.engines == link


def test_build_arguments_exist(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        if build := service.get("build"):
            assert (DOCKER / build["context"]).resolve() == DOCKER.parent
            text = (DOCKER / build["context"] / build["dockerfile"]).read_text()
            assert "target" not in build or f" AS {build['target']}\n" in text
            for name in build.get("args", {}):
                assert f"\nARG {name}=" in text


def test_tag_is_the_version(example: dict[str, str]) -> None:
    assert (
        f'\nversion = "{example["TOKEN2WAV_TAG"]}"\n'
        in (DOCKER.parent / "pyproject.toml").read_text()
    )


@pytest.mark.parametrize("name", SERVERS)
def test_ports(name: str, compose: dict[str, Any]) -> None:
    published = [defaults(port) for port in compose["services"][name]["ports"]]
    assert published == [
        f"127.0.0.1:{port}:{port}" for port in (Ports.http, Ports.grpc, Ports.metrics)
    ]


@pytest.mark.parametrize("name", SERVERS)
def test_server_command(name: str, compose: dict[str, Any]) -> None:
    service = compose["services"][name]
    task, *options = service["command"]
    assert task == "serve"
    assert f"\n        {task}) " in ENTRYPOINT.read_text()
    parsed = server_cli._parser().parse_args(["--model", "m", *options])
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace >= parsed.grace_seconds + 10, (
        "docker kills before the streams' time is over (docs/reliability.md)"
    )


def test_engines_command(compose: dict[str, Any]) -> None:
    [task] = compose["services"]["engines"]["command"]
    assert f"\n        {task}) " in ENTRYPOINT.read_text()
    assert compose["services"]["engines"]["restart"] == "no"
    condition = compose["services"]["server"]["depends_on"]["engines"]["condition"]
    assert condition == "service_completed_successfully"


@pytest.mark.parametrize("name", SERVERS)
def test_health_check(name: str, compose: dict[str, Any]) -> None:
    """Checks the command alone; tests/served/test_entrypoint.py runs it."""
    check = compose["services"][name]["healthcheck"]
    kind, program, *arguments = check["test"]
    assert (kind, program) == ("CMD", "token2wav-client")
    parsed = client_cli._parser().parse_args(arguments)
    assert parsed.url == f"127.0.0.1:{Ports.grpc}"
    assert int(check["timeout"].removesuffix("s")) > parsed.timeout


def test_gpus_are_reserved(compose: dict[str, Any]) -> None:
    for name in ("engines", "server"):
        [device] = compose["services"][name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert device["capabilities"] == ["gpu"]
        assert [defaults(number) for number in device["device_ids"]] == ["0"]
    assert "deploy" not in compose["services"]["server-cpu"]


def test_everything_is_confined(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
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


def test_the_triton_language_can_run_what_it_compiles(compose: dict[str, Any]) -> None:
    server = compose["services"]["server"]
    [options] = [
        options
        for path, _, options in (folder.partition(":") for folder in server["tmpfs"])
        if path == server["environment"]["TRITON_CACHE_DIR"]
    ]
    assert {"exec", "mode=0700", "uid=10001", "gid=10001"} <= set(options.split(","))
    # A replaced list must still contain the entries that all servers share.
    assert set(compose["x-server"]["tmpfs"]) < set(server["tmpfs"])


def test_images_are_pinned(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert re.search(r":v?\d+\.\d+\.\d+(-cpu)?$", defaults(service["image"])), service["image"]
