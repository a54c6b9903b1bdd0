"""Environment of a measurement: its description, saved together with the figures."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("torch", "numpy", "tritonclient", "nvidia-pytriton")
_TRITON = str(Path(sys.prefix) / "share" / "token2wav" / "triton")  # of `token2wav setup`


def describe(*packages: str) -> dict[str, Any]:
    """Describes date, command, commit, hardware and versions of this run.

    An unknown value is None: the version of a package that is not installed, or the commit outside
    a checkout.

    Args:
        packages: further packages, for their versions.
    """
    return {
        "date": date.today().isoformat(),
        "command": " ".join(["python -m", _program(), *sys.argv[1:]]),
        "commit": _commit(),
        "cpus": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in (*_PACKAGES, *packages)},
    }


def save(name: str, result: dict[str, Any]) -> None:
    """Writes a result beside the other results, without white space, because results are many."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, separators=(",", ":"))
    (RESULTS / f"{name}.json").write_text(text + "\n")


def saved_runs(name: str) -> list[dict[str, Any]]:
    """Returns the `runs` of a saved result; empty if nothing is saved."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["runs"] if path.is_file() else []


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty"]
    return (
        subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
        or None
    )


def _version(package: str) -> str | None:
    path = [*sys.path, _TRITON]
    return next((match.version for match in distributions(name=package, path=path)), None)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


def program_parser() -> ArgumentParser:
    """Returns a parser for the running program. The help text is the docstring of the program."""
    return ArgumentParser(
        f"python -m {_program()}",
        description=sys.modules["__main__"].__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )


# Functions that add the options of a command and run it, and the name of its result, by command.
Commands = Mapping[str, tuple[Callable[[ArgumentParser], None], Callable[[Namespace], None], str]]


def run_command(commands: Commands) -> None:
    """Runs the command of the program that the command line names. Each has the option `--name`."""
    parser = program_parser()
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_options, _, result) in commands.items():
        command = parsers.add_parser(name)
        add_options(command)
        command.add_argument("--name", default=result, help="name of the result file")
    options = parser.parse_args()
    try:
        commands[options.command][1](options)
    except ValueError as error:
        parser.error(str(error))


def _program() -> str:
    """Returns the name of the program that runs, as `python -m` takes it."""
    name: str = getattr(sys.modules["__main__"].__spec__, "name", sys.argv[0])
    return name.removesuffix(".__main__")
