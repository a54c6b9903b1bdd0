"""Sizes of the project: files, lines, words and settings are counted, each beside the most that it allows itself.

Prints a table. Counts only what git tracks. A family has a budget of its own, so the core is `token2wav/` without the
folders in `families/`, and without the modules that only families newer than CosyVoice3 and StreamFlow use. Those are
counted with the family that brought them.

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
# Modules outside of `families/`, with the family that brought them.
OF_NEW_FAMILIES = {
    "token2wav/networks/conformer.py": "cosyvoice2",
    "token2wav/networks/unet.py": "cosyvoice2",
    "token2wav/networks/step_audio_dit.py": "stepaudio2",
}


def tracked(*folders: str, suffix: str) -> list[Path]:
    """Lists files below some folders that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name.endswith(suffix)]


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def core() -> list[Path]:
    """Lists files of the library that serve every family."""
    brought = {ROOT / name for name in OF_NEW_FAMILIES}
    files = tracked("token2wav", suffix=".py")
    return [path for path in files if FAMILIES not in path.parent.parents and path not in brought]


def family(name: str) -> list[Path]:
    """Lists files of a family's folder, and those that it brought."""
    brought = [ROOT / path for path, owner in OF_NEW_FAMILIES.items() if owner == name]
    return [*tracked(f"token2wav/families/{name}", suffix=".py"), *brought]


def main() -> None:
    settings = sum(len(dataclasses.fields(part)) for part in (StreamConfig, RuntimeConfig, LimitConfig))
    pages = tracked("docs", suffix=".md")
    others = tracked("server", "client", "exporters", "voices", suffix=".py")
    report = tracked("benchmarks/gpu", "benchmarks/gpu_check.py", suffix=".py")
    families = sorted({path.parent.name for path in tracked("token2wav/families", suffix=".py")} - {FAMILIES.name})
    for what, found, most in (
        ("files of the core", len(core()), 55),
        ("lines of the core", lines(core()), 8500),
        *((f"lines of the family {name}", lines(family(name)), MOST_OF_A_FAMILY) for name in families),
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
