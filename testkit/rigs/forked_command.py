"""The command `token2wav` in a process that is forked from one with its imports.

A process of its own reads its environment anew, and a new interpreter would import for seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from testkit.patience import PATIENCE_SECONDS
from token2wav import commands

_context = multiprocessing.get_context("forkserver")
# All that the commands import, but not huggingface_hub, which reads its variables when it is
# imported; and pytest, because every process imports the main module.
_context.set_forkserver_preload(
    [__name__, "httpx", "numpy", "pytest", "token2wav.hub", "token2wav_gateway.cli"]
)


def start(
    *arguments: str,
    out: Path,
    err: Path,
    variables: Mapping[str, str] | None = None,
    descriptors: int = 0,
) -> BaseProcess:
    """Starts the command.

    Args:
        out, err: files for its output, which may be one.
        variables: further variables of its environment.
        descriptors: its limit of file descriptors; 0 for that of this process.
    """
    process = _context.Process(
        target=_main, args=(arguments, out, err, dict(variables or {}), descriptors)
    )
    process.start()
    return process


def run(variables: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command with further variables of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = start(*arguments, out=out, err=err, variables=variables)
        process.join(PATIENCE_SECONDS)
        assert process.exitcode is not None, err.read_text()
        return subprocess.CompletedProcess(
            arguments, process.exitcode, out.read_text(), err.read_text()
        )


def _main(
    arguments: Sequence[str], out: Path, err: Path, variables: dict[str, str], descriptors: int
) -> None:
    os.environ.update(variables)
    tempfile.tempdir = None  # chosen again, by the new variables
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    sys.exit(commands.main(arguments))
