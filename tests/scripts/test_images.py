"""The script of `make images`, which builds the images of docker-compose.yml. `make images-check`
builds and runs the images themselves.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from testkit.rigs.container import DOCKER, ROOT

SCRIPT = ROOT / "scripts" / "images.sh"


def images(
    folder: Path, *words: str, builder: str = "", works: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs the script on a machine with one builder, which prints its arguments."""
    for program in ("bash", "dirname"):
        (folder / program).symlink_to(f"/usr/bin/{program}")
    if builder:
        (folder / builder).write_text(
            f'#!/bin/sh\n[ "$1" = info ] && exit {int(not works)}\necho "called: $*"\n'
        )
        (folder / builder).chmod(0o755)
    environment = {"PATH": str(folder)}
    return subprocess.run(
        [SCRIPT, *words], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_builds_the_images_of_the_compose_file(builder: str, tmp_path: Path) -> None:
    done = images(tmp_path, "--build-arg=A=b c", builder=builder)
    assert done.returncode == 0, done.stderr
    commands = [
        shlex.split(line) for line in done.stdout.splitlines() if line.startswith("called: build ")
    ]
    builds = {
        (words[words.index("--tag") + 1], words[words.index("--file") + 1]) for words in commands
    }
    assert all("--build-arg=A=b" in words for words in commands)
    services = yaml.safe_load((DOCKER / "docker-compose.yml").read_text())["services"].values()
    built = [service for service in services if "build" in service]
    names = {
        re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["image"]): service["build"]
        for service in built
    }
    assert builds == {(name, build["dockerfile"]) for name, build in names.items()}
    for words in commands:
        target = names[words[words.index("--tag") + 1]].get("target")
        assert target is None or words[words.index("--target") + 1] == target


def test_builds_one_image(tmp_path: Path) -> None:
    done = images(tmp_path, "client", builder="podman")
    assert done.stdout.splitlines()[0] == "images: podman builds token2wav-client:0.1.0"
    assert done.stdout.count("called: ") == 1


@pytest.mark.parametrize(
    ("words", "builder", "message"),
    [
        ([], "", "none of docker, podman and buildah works here"),
        ([], "docker", "none of docker, podman and buildah works here"),
        (["servr"], "podman", "servr is not one of cpu, gpu, client"),
    ],
)
def test_builds_that_are_refused(
    words: list[str], builder: str, message: str, tmp_path: Path
) -> None:
    done = images(tmp_path, *words, builder=builder, works=builder == "podman")
    assert done.returncode == 1
    assert message in done.stderr
