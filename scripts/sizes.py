"""Sizes of the project: files, lines, words and settings are counted, each beside the most that it allows itself.

Prints a table. Counts only what git tracks. The folder of each family has a budget of its own. So have those that came
after the core was planned, together with the networks that only they use; the core is the rest of `token2wav/`.

    .venv/bin/python scripts/sizes.py
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterable
from pathlib import Path

from token2wav.config import LimitConfig, RuntimeConfig, StreamConfig

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ROOT / "token2wav" / "families"
MOST_OF_A_FAMILY = 600
NEWER_FAMILIES = ("cosyvoice2", "stepaudio2", "chatterbox")
NEWER_NETWORKS = [ROOT / "token2wav" / "networks" / name for name in ("conformer.py", "unet.py", "step_audio_dit.py")]


def tracked(*folders: str, suffix: str) -> list[Path]:
    """Lists files below some folders that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name.endswith(suffix)]


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def core() -> list[Path]:
    """Lists files of the library that serve every family."""
    files = tracked("token2wav", suffix=".py")
    return [path for path in files if FAMILIES not in path.parent.parents and path not in NEWER_NETWORKS]


def family(*names: str) -> list[Path]:
    """Lists files in folders of families."""
    return tracked(*(f"token2wav/families/{name}" for name in names), suffix=".py")


def main() -> None:
    settings = sum(len(dataclasses.fields(part)) for part in (StreamConfig, RuntimeConfig, LimitConfig))
    pages = tracked("docs", suffix=".md")
    others = tracked("server", "client", "exporters", "voices", suffix=".py")
    report = tracked("benchmarks/gpu", "benchmarks/gpu_check.py", suffix=".py")
    families = sorted({path.parent.name for path in tracked("token2wav/families", suffix=".py")} - {FAMILIES.name})
    newer = [*family(*NEWER_FAMILIES), *NEWER_NETWORKS]
    for what, found, most in (
        ("files of the core", len(core()), 55),
        ("lines of the core", lines(core()), 8500),
        *((f"lines of the family {name}", lines(family(name)), MOST_OF_A_FAMILY) for name in families),
        ("lines of three newer families, with networks", lines(newer), len(NEWER_FAMILIES) * MOST_OF_A_FAMILY),
        ("lines of server, client, exporters and voices", lines(others), 8500),
        ("lines of benchmarks", lines(tracked("benchmarks", suffix=".py")), 3500),
        ("lines of the GPU report", lines(report), 1300),
        ("settings", settings, 20),
        ("lines of README.md", len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()), 130),
        ("words of docs/", sum(len(page.read_text(encoding="utf-8").split()) for page in pages), 16000),
    ):
        print(f"{what:46} {found:6} {'of at most' if found <= most else 'more than'} {most:6}")


if __name__ == "__main__":
    main()
