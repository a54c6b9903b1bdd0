"""Everything that only a GPU can show, unattended: the tests that need one, then every engine's parity and times.

Prints a table and writes one JSON, benchmarks/results/gpu_check.json, and a plot. What is not installed is left out and
says so. Ends with 1 if a test failed or an engine is beyond its bounds.

    make gpu-check
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import plot, run
from benchmarks.environment import RESULTS, ROOT, describe, save
from benchmarks.models import SIZES


def gpu_tests() -> dict[str, Any]:
    """Runs the tests with the mark `gpu`; counts, and the names of those that failed."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "gpu", "-ra", f"--junitxml={report}"], cwd=ROOT, check=False
        )
        suite = next(ElementTree.parse(report).iter("testsuite"))
    failed = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {name: int(suite.get(name, "0")) for name in ("tests", "skipped")} | {"failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, "full"], default=[*SIZES, "full"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--name", default="gpu_check", help="of the result files")
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else None
    tests = gpu_tests()
    results = run(options.device, options.sizes, options.batches, [0, 2, 10, 30])
    save(options.name, {**describe(), "gpu": gpu, "tests": tests, "results": [asdict(result) for result in results]})
    plot(results, RESULTS / f"{options.name}.png")
    beyond = [result.case.label for result in results if result.verification and result.verification["failures"]]
    print(f"tests: {tests['tests']} run, {tests['skipped']} skipped, {len(tests['failed'])} failed")
    print(f"engines beyond their bounds: {', '.join(beyond) or 'none'}")
    return 1 if tests["failed"] or beyond else 0


if __name__ == "__main__":
    sys.exit(main())
