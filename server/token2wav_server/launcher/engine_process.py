"""Process of the engine, which the launcher starts beside tritonserver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from token2wav_server.launcher.log import LogPump, failure_reason

_MODULE = "token2wav_server.engine"
_CONNECTED = ".connected"  # the engine makes a file with this suffix while a front is connected
_KILL_S = 5.0
_LOG_S = 2.0  # longest time in which the last lines of an ended engine are read


def python_command(module: str) -> list[str]:
    """Returns the command that runs a module, as `python -m` does.

    `python -m` would look for every imported module in the working directory first. It may be a
    model folder, and no file of a model folder is ever executed.
    """
    program = (
        "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", program]


class EngineProcess:
    """Process of one engine, which starts at once, and then loads the model.

    The reaper kills every process whose environment names the folder of the socket, so that an
    engine does not outlive its server.

    Args:
        socket: path of the Unix socket on which the engine listens, also a variable of the
            environment.
    """

    def __init__(
        self,
        socket: Path,
        environment: Mapping[str, str],
        sink: TextIO,
        shown: Callable[[str], bool],
    ) -> None:
        self._connected = socket.with_name(socket.name + _CONNECTED)
        self._connected.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [*python_command(_MODULE), f"--parent={os.getpid()}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that Ctrl-C in a terminal reaches only the launcher
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._log = LogPump(self._process.stdout, sink, shown)
        self._log.start()

    @property
    def is_connected(self) -> bool:
        """Whether the model is loaded, and the front is connected."""
        return self._connected.exists()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        # A process that waits for a driver cannot be killed before the driver answers.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        self._log.join(_LOG_S)

    def failure_reason(self) -> str:
        """Returns why the process has ended, as a sentence about the engine."""
        self._log.join(_LOG_S)
        status = self._process.wait()
        if status < 0:
            return f"the engine was killed by signal {signal.Signals(-status).name}"
        return f"the engine ended with status {status}: {failure_reason([*self._log.lines])}"
