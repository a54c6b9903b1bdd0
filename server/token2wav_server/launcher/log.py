"""Log of a running server: it reads what tritonserver and its models print, and shows what a person
wants to see.
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
_KILLED = 128  # and the number of the signal, as an exit status

# "I1121 03:55:22.845388 3026 model.py:5] "text"", where the text has \n for a line break.
_TRITON_LINE = re.compile(r"^(?P<level>[IWE])\d{4} [\d:.]+ \d+ (?P<source>\S+):\d+\] (?P<text>.*)$")
# of a model, once it is loaded
_SUMMARY = re.compile(rf'^I\d{{4}} [\d:.]+ \d+ \S+\.py:\d+\] "({SUMMARY}.*)"$')
_LOAD_FAILURE = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: \w+: (?P<reason>.*)")
_STARTUP_ERROR = re.compile(r"error:|.*: (unrecognized option|option .* requires an argument)")
# every value of a model's configuration, in one line
_DETAILS = re.compile(r'"?configuration [0-9a-f]+ of ')
# Printed on every machine without a GPU, and of no consequence there; and Triton's stack when it is
# killed.
_NOISE = re.compile(
    r"NVML|DCGM|CudaDriverHelper|CUDA driver version is "
    r"insufficient|pinned_memory_manager|cuda_memory_manager"
    r"|^Signal \(\d+\) received|^ *\d+# "
)
_TABLE = re.compile(r"^([+|].*)?$")
# What tritonserver prints after an option that it does not know: some hundred lines.
_USAGE = re.compile(r"^(Usage: |  --|\t|[A-Z][A-Za-z/ ]+:$)")


class LogPump(threading.Thread):
    """Thread that moves the lines which are to be shown from the server's output to ``sink``, until
    nobody can write.

    Lines of a model's summary are shown without the head of Triton's log. If the sink breaks, the
    pipe is still
    emptied: the server never blocks. `lines` are the latest, shown or not.
    """

    def __init__(self, source: IO[bytes], sink: TextIO, shown: Callable[[str], bool]) -> None:
        super().__init__(name="tritonserver-log", daemon=True)
        self._source, self._sink, self._shown = source, sink, shown
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def run(self) -> None:
        with self._source:
            for raw in self._source:
                line = raw.decode(errors="replace").rstrip("\n")
                self.lines.append(line)
                if self._shown(line):
                    show(_SUMMARY.sub(r"\1", line), self._sink)


def show(line: str, sink: TextIO) -> None:
    """Writes a line for a person.

    A sink that is broken, such as a closed terminal, must not end the server.
    """
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sink, flush=True)


def failure_reason(lines: Sequence[str], status: int | None = None) -> str:
    """Returns what explains the failure of a server, out of its exit status and its output.

    The signal that killed the reaper (a negative status) comes first, then the reaper's own
    message, then the signal that killed the server, then models that failed to load, each with the
    message of its own exception; without one, Triton's error lines; without those, the last lines.
    """
    if status is not None and status < 0:
        return f"the reaper, which is the parent of tritonserver, was killed by {signal.Signals(-status).name}"
    if said := [line.removeprefix(MESSAGE) for line in lines if line.startswith(MESSAGE)]:
        return said[-1]
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
    wanted = [text for text in errors if not _NOISE.search(text)]
    return "; ".join(dict.fromkeys(wanted)) or last_words(lines) or "it printed nothing"


def matters(line: str) -> bool:
    """Says whether a person should see a line: a warning, an error or what a model prints, if not
    told elsewhere.
    """
    if line.startswith(MESSAGE) or _TABLE.match(line) or _NOISE.search(line) or _USAGE.match(line):
        return False
    parts = _TRITON_LINE.match(line)
    if parts is None or parts["level"] != "I":
        return True
    return parts["source"].endswith(".py") and not _DETAILS.match(parts["text"])


def last_words(lines: Sequence[str]) -> str:
    """Joins the last lines to one."""
    return "; ".join(dict.fromkeys([line.strip() for line in lines if line.strip()][-10:]))


def _plain(text: str) -> str:
    """Removes the quotes around a text of Triton's log, and the Python traceback after it."""
    return text.strip('"').split(r"\n\nAt:\n", 1)[0].replace(r"\n", " ").strip()
