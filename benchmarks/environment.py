"""Environment of a measurement: it is described beside the figures, and saved with them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("torch", "numpy", "tritonclient", "nvidia-pytriton")


def describe(*packages: str) -> dict[str, Any]:
    """Describes date, command, commit, hardware and versions of this run, those of further packages included."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "date": date.today().isoformat(),
        "command": " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "cpus": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in (*_PACKAGES, *packages)},
    }


def save(name: str, result: dict[str, Any]) -> None:
    """Writes a result beside the others."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
