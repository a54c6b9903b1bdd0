"""Section tests: test files that have the mark `gpu`, with their numbers of tests."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.gpu.settings import LeftOut, Row, Rows, Settings

COMMAND = [
    *(sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--color=no", "--tb=short"),
    *("-p", "no:cacheprovider"),
    # tests/conftest.py needs further packages, and hides the GPU
    f"--confcutdir={ROOT / 'tests' / 'execution'}",
]


def tests(folder: Path, settings: Settings) -> Rows:
    """Runs test files and folders at the same time, each in a process of its own.

    The rows come in the order in which the processes end. So a slow file hides no other file.
    """
    paths = files_of_tests()[: settings.test_files or None]
    with ThreadPoolExecutor(len(paths)) as pool:
        running = {pool.submit(_run, path): str(path.relative_to(ROOT)) for path in paths}
        for done in as_completed(running):
            yield running[done], partial(_outcome, done.result())


def files_of_tests() -> list[Path]:
    """Returns the test files, and folders of test files, that have the mark `gpu`."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    marked = [path for path in paths if "mark.gpu" in path.read_text()]
    # A mark in a conftest.py applies to all tests of its folder.
    return [path if path.name.startswith("test_") else path.parent for path in marked]


def _run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _outcome(done: subprocess.CompletedProcess[str]) -> Row:
    status, text = done.returncode, done.stdout
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
