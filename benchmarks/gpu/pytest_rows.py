"""Rows of test files that have the mark `gpu`, with their numbers of tests."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.gpu.settings import LeftOut, Row, Rows

COMMAND = [
    *(sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--color=no", "--tb=short"),
    *("-p", "no:cacheprovider"),
    # tests/conftest.py needs further packages, and hides the GPU
    f"--confcutdir={ROOT / 'tests' / 'execution'}",
]


def rows_of_tests(paths: Sequence[Path]) -> Rows:
    """Runs test files or folders at the same time, each in a process of its own.

    The rows come in the order in which the processes end. So a slow file hides no other file.

    Args:
        paths: test files or folders.
    """
    running: dict[str, tuple[subprocess.Popen[bytes], Any]] = {}
    for path in paths:
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (its row closes it)
        process = subprocess.Popen(
            [*COMMAND, str(path)], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
        running[str(path.relative_to(ROOT))] = process, output
    while running:
        ended = [name for name, (process, _) in running.items() if process.poll() is not None]
        for name in ended:
            yield name, partial(_outcome, *running.pop(name))
        time.sleep(0.1)


def _outcome(process: subprocess.Popen[bytes], output: Any) -> Row:
    status = process.wait()
    with output:
        output.seek(0)
        text = output.read()
    print(text, flush=True)
    missing = re.search(r"No module named '?([\w.]+)", text)
    outcomes = re.findall(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE)
    passed, skipped = (
        sum(outcome == word for _, outcome in outcomes) for word in ("PASSED", "SKIPPED")
    )
    # A missing package explains a file without any test, and nothing else.
    if missing and not outcomes:
        raise LeftOut(f"not installed: {missing[1]}")
    failed = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
    reasons = re.findall(r"^E +(\S.{0,120})", text, re.MULTILINE)
    problem = f"pytest ended with {status}: {', '.join(failed[:5])}: {'; '.join(reasons[:3])}"
    return {
        "passed": passed,
        "skipped": skipped,
        # status 5: no tests were collected
        "problem": None if status in (0, 5) else problem,
    }
