"""Sizes of the project: files, lines, words and settings are counted, each beside the most that it allows itself.

Prints a table. Counts only what git tracks.

    .venv/bin/python scripts/sizes.py
"""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

from token2wav.config import LimitConfig, RuntimeConfig, StreamConfig

ROOT = Path(__file__).resolve().parents[1]


def tracked(*folders: str, suffix: str) -> list[Path]:
    """Lists files below some folders that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name.endswith(suffix)]


def lines(*folders: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tracked(*folders, suffix=".py"))


def main() -> None:
    settings = sum(len(dataclasses.fields(part)) for part in (StreamConfig, RuntimeConfig, LimitConfig))
    pages = tracked("docs", suffix=".md")
    for what, found, most in (
        ("files of the core", len(tracked("token2wav", suffix=".py")), 55),
        ("lines of the core", lines("token2wav"), 8500),
        ("lines of server, client, exporters and voices", lines("server", "client", "exporters", "voices"), 8500),
        ("lines of benchmarks", lines("benchmarks"), 3500),
        ("lines of the GPU report", lines("benchmarks/gpu", "benchmarks/gpu_check.py"), 1300),
        ("settings", settings, 20),
        ("lines of README.md", len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()), 130),
        ("words of docs/", sum(len(page.read_text(encoding="utf-8").split()) for page in pages), 16000),
    ):
        print(f"{what:46} {found:6} {'of at most' if found <= most else 'more than'} {most:6}")


if __name__ == "__main__":
    main()
