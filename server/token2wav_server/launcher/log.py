"""Log of a running server: reads the output of tritonserver and its models, and shows a part of it.

The part is meant for operators of the server: warnings, errors and a summary of the model.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, TextIO

from token2wav_server.launcher.reaper import MESSAGE
from token2wav_server.model_process import SUMMARY

_KEPT_LINES = 2000
_KILLED = 128  # a process that signal n has ended has the exit status 128 + n

# A line looks like: I1121 03:55:22.845388 3026 model.py:5] "text". Line breaks in the text are \n.
_TRITON_LINE = re.compile(r"^(?P<level>[IWE])\d{4} [\d:.]+ \d+ (?P<source>\S+):\d+\] (?P<text>.*)$")
# A line of the summary that a model logs once it is loaded.
_SUMMARY = re.compile(rf'^I\d{{4}} [\d:.]+ \d+ \S+\.py:\d+\] "({SUMMARY}.*)"$')
_LOAD_FAILURE = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: \w+: (?P<reason>.*)")
_STARTUP_ERROR = re.compile(r"error:|.*: (unrecognized option|option .* requires an argument)")
# The line with every value of a model's configuration.
_DETAILS = re.compile(r'"?configuration [0-9a-f]+ of ')
# Lines that Triton prints on every machine without a GPU, where they have no consequence. The last
# two patterns match the stack trace that Triton prints when a signal ends it.
_NOISE = re.compile(
    r"NVML|DCGM|CudaDriverHelper|CUDA driver version is "
    r"insufficient|pinned_memory_manager|cuda_memory_manager"
    r"|^Signal \(\d+\) received|^ *\d+# "
)
_TABLE = re.compile(r"^([+|].*)?$")
# The help text that tritonserver prints after an unknown option: some hundred lines.
_USAGE = re.compile(r"^(Usage: |  --|\t|[A-Z][A-Za-z/ ]+:$)")


class LogPump(threading.Thread):
    """Thread that reads the output of the server, and writes some of its lines to a sink.

    The thread ends when all processes that write to the pipe have ended. Lines of a model's summary
    are written without the header of Triton's log. If writing to the sink fails, the thread still
    reads the pipe, so that the server never blocks.

    Args:
        shown: function that decides whether a line is written to the sink.

    Attributes:
        lines: the latest 2000 lines of the output, including lines that were not written.
    """

    def __init__(self, source: IO[bytes], sink: TextIO, shown: Callable[[str], bool]) -> None:
        super().__init__(name="tritonserver-log", daemon=True)
        self._source, self._sink, self._shown = source, sink, shown
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def run(self) -> None:
        with self._source:
            for raw_line in self._source:
                line = raw_line.decode(errors="replace").rstrip("\n")
                self.lines.append(line)
                if self._shown(line):
                    show(_SUMMARY.sub(r"\1", line), self._sink)


def show(line: str, sink: TextIO) -> None:
    """Writes a line to a terminal or file.

    An error of the sink is ignored: a closed terminal, for example, must not end the server.
    """
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sink, flush=True)


def failure_reason(lines: Sequence[str], status: int | None = None) -> str:
    """Returns the reason for the failure of a server, from its exit status and its output.

    A message of the reaper explains more than a signal, and a model that failed to load more than
    the errors of Triton that follow.

    Args:
        status: exit status of the reaper; None if the reaper still runs.
    """
    if status is not None and status < 0:
        return (
            f"the reaper, which is the parent of tritonserver, was killed by "
            f"{signal.Signals(-status).name}"
        )
    if messages := [line.removeprefix(MESSAGE) for line in lines if line.startswith(MESSAGE)]:
        return messages[-1]
    if status is not None and status > _KILLED:
        return f"tritonserver was killed by {signal.Signals(status - _KILLED).name}"
    loads = {}
    errors = []
    for line in lines:
        parts = _TRITON_LINE.match(line)
        text = _plain(parts["text"]) if parts else line
        if failure := _LOAD_FAILURE.search(text):
            loads[failure["model"]] = failure["reason"]
        if (parts is None and _STARTUP_ERROR.match(text)) or (parts and parts["level"] == "E"):
            errors.append(text)
    if loads:
        return "; ".join(
            f"model '{model}' failed to load: {reason}" for model, reason in loads.items()
        )
    relevant = [text for text in errors if not _NOISE.search(text)]
    return "; ".join(dict.fromkeys(relevant)) or last_lines(lines) or "it printed nothing"


def is_relevant(line: str) -> bool:
    """Returns whether a line of the output should be shown to a person.

    Warnings, errors and lines printed by models are shown. Messages of the reaper are not, because
    the launcher reports them itself. Tables, the help text and lines without consequence are not
    shown either.
    """
    if line.startswith(MESSAGE) or _TABLE.match(line) or _NOISE.search(line) or _USAGE.match(line):
        return False
    parts = _TRITON_LINE.match(line)
    if parts is None or parts["level"] != "I":
        return True
    return parts["source"].endswith(".py") and not _DETAILS.match(parts["text"])


def last_lines(lines: Sequence[str]) -> str:
    """Joins the last 10 lines that are not empty into one, without repetitions."""
    return "; ".join(dict.fromkeys([line.strip() for line in lines if line.strip()][-10:]))


def _plain(text: str) -> str:
    """Removes the quotes around a message in Triton's log, and the Python traceback after it."""
    return text.strip('"').split(r"\n\nAt:\n", 1)[0].replace(r"\n", " ").strip()
