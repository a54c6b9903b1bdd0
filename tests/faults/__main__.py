"""Guard of the tests: puts faults into the code, one at a time, and runs the tests that find them.

Each row of `tests/faults/*.yaml` is a fault, of the past or made up: an edit, and its tests. The
edits are made in copies of the tree, so your files stay as they are. Model processes of
tritonserver import the installed packages and not the copy. A fault in their code is therefore
found only by tests without tritonserver. `make faults` tries all rows, and `make faults
ARGS="client gateway"` those of two tables. `ARGS=--list` prints the faults.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import yaml
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
TABLES = Path(__file__).parent
# Folders that hold packages, in front of the packages that the environment has installed.
PACKAGE_FOLDERS = (".", "client", "exporters", "gateway", "server", "voices")
COPIES = 2  # faults that are tried at the same time, each in a copy of the tree
LONGEST_SECONDS = 600.0  # longest time of the tests of a fault
HANG_SECONDS = 120.0  # the same for a fault that makes its test hang
BASELINE_SECONDS = 3600.0  # longest time of all tests together, without a fault
PATIENCE_SECONDS = 90.0  # in which a test waits for an event that the fault may prevent
TESTS_FAILED = 1  # exit status of pytest; others mean that no test ran


@dataclass(frozen=True)
class Fault:
    """Fault, and its tests.

    Attributes:
        name: one sentence that says which behaviour is wrong.
        file: file of the fault, from the root of the tree.
        old: lines of today, which stand in the file exactly once.
        new: lines with the fault.
        found_by: identifiers of tests, from the folder `tests`.
        mended_by: commit that mended a fault of the past; empty for one that is made up.
        hangs: whether the tests find the fault by never ending.
    """

    name: str
    file: str
    old: str
    new: str
    found_by: tuple[str, ...]
    mended_by: str = ""
    hangs: bool = False

    @contextmanager
    def put_back(self, tree: Path) -> Iterator[None]:
        """Edits the file in a copy of the tree, and restores it at the end.

        Raises:
            ValueError: the lines of today do not stand in the file exactly once.
        """
        path = tree / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"the lines to edit stand {count} times in {self.file}, not once")
        path.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(text)


def read_faults(tables: Sequence[str]) -> list[Fault]:
    """Reads the faults of the tables with these names; of all tables if there is no name."""
    paths = [TABLES / f"{name}.yaml" for name in tables] or sorted(TABLES.glob("*.yaml"))
    rows = [row for path in paths for row in yaml.safe_load(path.read_text())]
    return [Fault(**row | {"found_by": tuple(row["found_by"])}) for row in rows]


def copy_tree(target: Path) -> Path:
    """Copies the tracked and new files of the tree, without those that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, copy = ROOT / name, target / name
        if source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    return target


def run_tests(tree: Path, tests: Sequence[str], longest_seconds: float) -> tuple[int | None, str]:
    """Runs tests in a copy of the tree until the first one fails.

    Returns:
        Exit status of pytest, None if the tests did not end; and the end of its output.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(tree / folder) for folder in PACKAGE_FOLDERS),
        "TOKEN2WAV_PATIENCE_S": str(PATIENCE_SECONDS),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", ""]
    # A session of its own, so that the processes of a test that never ends are stopped too.
    process = subprocess.Popen(
        [*command, *(f"tests/{test}" for test in tests)],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=longest_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return None, output[-2000:]
    return process.returncode, output[-2000:]


def problem_of(fault: Fault, tree: Path) -> str:
    """Returns why the fault does not count as found; empty if a test found it."""
    try:
        with fault.put_back(tree):
            seconds = HANG_SECONDS if fault.hangs else LONGEST_SECONDS
            status, output = run_tests(tree, fault.found_by, seconds)
    except ValueError as error:
        return str(error)
    if status == (None if fault.hangs else TESTS_FAILED):
        return ""
    if status == 0:
        return f"no test found it: {', '.join(fault.found_by)}"
    return f"pytest ended with {status}:\n{output}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("tables", nargs="*", help="tables to run, such as client; all by default")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    options = parser.parse_args()
    known = sorted(path.stem for path in TABLES.glob("*.yaml"))
    if unknown := [name for name in options.tables if name not in known]:
        parser.error(f"tables: {unknown[0]!r} is not one of: {', '.join(known)}")
    faults = read_faults(options.tables)
    if options.list:
        print("\n".join(f"{fault.file}: {fault.name}" for fault in faults))
        return 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(COPIES) as pool:
        trees = SimpleQueue[Path]()
        for number in range(COPIES):
            trees.put(copy_tree(Path(folder) / str(number)))

        def judge(fault: Fault) -> str:
            tree = trees.get()
            try:
                return problem_of(fault, tree)
            finally:
                trees.put(tree)

        # A test that fails without its fault finds nothing.
        tests = sorted({test for fault in faults for test in fault.found_by})
        status, output = run_tests(tree := trees.get(), tests, BASELINE_SECONDS)
        trees.put(tree)
        if status != 0:
            problem = "do not end" if status is None else "fail"
            print(f"the tests {problem} without a fault:\n{output}", file=sys.stderr)
            return 1
        judged = tqdm(pool.map(judge, faults), total=len(faults), unit="fault")
        problems = {
            fault.name: problem for fault, problem in zip(faults, judged, strict=True) if problem
        }
    for name, problem in problems.items():
        print(f"NOT FOUND: {name}\n  {problem}", file=sys.stderr)
    print(f"{len(faults) - len(problems)} of {len(faults)} faults found")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
