"""Processes of this machine and their relations, as /proc describes them; commands that end."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from testkit.patience import PATIENCE_SECONDS


def stat_fields(process: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name, which is in parentheses."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def program(process: int) -> str:
    """Returns the first 15 characters of the name of a process's program."""
    return Path(f"/proc/{process}/comm").read_text().strip()


def command_line(process: int) -> bytes:
    """Returns the words of the command of a process, each with a zero byte after it."""
    return Path(f"/proc/{process}/cmdline").read_bytes()


def environment(process: int) -> bytes:
    """Returns the environment with which a process was started; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/environ").read_bytes()
    return b""


def parent(process: int) -> int:
    return int(stat_fields(process)[1])


def resident_mib(process: int) -> float:
    """Returns the resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def entries(process: int, folder: str) -> int:
    """Counts the entries of a folder of /proc/PID: `task` has the threads, `fd` the descriptors."""
    return len(list(Path(f"/proc/{process}/{folder}").iterdir()))


def children(process: int) -> list[int]:
    pids: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # a thread may end after it was listed
            pids += map(int, file.read_text().split())
    return pids


def descendants(process: int) -> list[int]:
    return [pid for child in children(process) for pid in (child, *descendants(child))]


def run(*command: object, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Runs a command to its end, with bytes as its input; its output is captured."""
    return subprocess.run(
        list(map(str, command)),
        input=text,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
