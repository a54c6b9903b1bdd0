from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    } | environment
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.13"])
def test_python_that_is_not_supported(version: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    done = run("scripts/setup.sh", PYTHON=str(python))
    assert done.returncode == 1
    assert done.stderr == (
        f"setup: error: {python} is Python {version}, but 3.10, 3.11 or 3.12 is needed: "
        "name one, as in PYTHON=python3.12 make setup\n"
    )


def test_python_that_is_missing() -> None:
    done = run("make", "lint", PYTHON="python3.99")
    assert done.returncode != 0
    assert "setup: error: python3.99 not found: install Python 3.10, 3.11 or 3.12" in done.stderr


def test_serve_without_a_model() -> None:
    done = run("make", "serve")
    assert done.returncode != 0
    assert done.stderr.startswith(
        "make serve: MODEL is missing; run: make serve MODEL=path/to/folder\n"
    )


def test_serve_passes_options_on() -> None:
    done = run(
        "make", "--dry-run", "serve", "MODEL=folder", "ARGS=--http-inference --status-port 8003"
    )
    assert done.returncode == 0
    *_, command = done.stdout.replace("\\\n", " ").splitlines()
    assert re.fullmatch(
        r'\.venv/bin/token2wav serve "folder" .* --http-inference --status-port 8003',
        command,
    )


def test_help_is_the_default_and_lists_every_target() -> None:
    done = run("make")
    targets = [line.split()[1] for line in done.stdout.splitlines()]
    named = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named
    assert targets == named[1].split()
    assert targets[:5] == ["help", "setup", "demo", "speech", "test"]
