"""Processes of this machine and their relations, as /proc describes them; commands that run."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from testkit.patience import PATIENCE_SECONDS, until
from token2wav_server.launcher.reaper import children as children

_Program = TypeVar("_Program", bound="Program")


@dataclass
class Program:
    """Command that runs.

    Attributes:
        printed: all lines of its output and its errors so far.
    """

    process: subprocess.Popen[str]
    printed: list[str] = field(default_factory=list, init=False)
    _lines: queue.Queue[str | None] = field(default_factory=queue.Queue, init=False)

    @classmethod
    @contextmanager
    def run(
        cls: type[_Program],
        words: Sequence[str],
        *fields: Any,
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[_Program]:
        """Runs a command, reads its output, and kills it at the end.

        Args:
            fields: further fields of a subclass.
        """
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            program = cls(process, *fields)
            threading.Thread(target=program._read, daemon=True).start()
            try:
                yield program
            finally:
                if process.poll() is None:
                    process.kill()

    def wait_for_line(self, pattern: str) -> str:
        """Reads the output of the command until a line matches."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.0))
            assert line is not None, "\n".join(self.printed)
            if re.search(pattern, line):
                return line

    def wait(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line.rstrip("\n"))
            self._lines.put(self.printed[-1])
        self._lines.put(None)


def stat_fields(process: int | str) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name, which is in parentheses. A thread is
    named PID/task/TID.
    """
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def suspend(process: int) -> None:
    """Stops a process until SIGCONT, and returns once all its threads have stopped. A process that
    has not stopped yet handles signals that were sent after SIGSTOP.
    """
    os.kill(process, signal.SIGSTOP)

    def all_stopped() -> bool:
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread has just ended
            threads = Path(f"/proc/{process}/task").iterdir()
            states = {stat_fields(f"{process}/task/{thread.name}")[0] for thread in threads}
            return states <= {"T", "Z"}
        return False

    until(all_stopped)


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


def descendants(process: int) -> list[int]:
    return [pid for child in children(process) for pid in (child, *descendants(child))]


def finished(
    *command: object, text: bool = True, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Runs a command to its end, and captures its output.

    Args:
        text: whether input and output are text; else they are bytes.
        options: further arguments of `subprocess.run`.
    """
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=text,
        timeout=PATIENCE_SECONDS,
        check=False,
        **options,
    )
