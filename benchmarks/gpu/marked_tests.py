"""Section tests: those with the mark `gpu`, which skip where there is none."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.gpu.records import Record
from benchmarks.gpu.settings import Settings


def tests(folder: Path, settings: Settings, record: Record) -> None:
    """Writes how many there are and were skipped, and the names of those that failed. They have models of their own."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "gpu", "-ra", f"--junitxml={report}"], cwd=ROOT, check=False
        )
        suite = next(ElementTree.parse(report).iter("testsuite"))
    for name in ("tests", "skipped"):
        record.put(name, int(suite.get(name, "0")))
    failed = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    record.put("failed", failed)
