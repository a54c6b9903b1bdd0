"""Links between the processes of the ensemble, beside those of Triton.

Triton passes chunks from stage to stage, and nothing back. So every process has a Unix socket in
the private folder of the server, on which the other processes send it letters: the stages report
the results of chunks to the accumulator, and the accumulator tells the stages which streams have
ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from token2wav.errors import ConfigError
from token2wav.serving.delivery import attempt
from token2wav_server.model_process import ENGINE_VARIABLE

log = logging.getLogger(__name__)

ACCUMULATOR, STAGES = "token_accumulator", ("flow", "vocoder")  # names of the models
_MOST_BYTES = 1 << 16  # of a letter


class Mailbox:
    """Socket of a process, with a thread that reads its letters.

    Args:
        take: receives each letter, as `send` got it.

    Raises:
        ConfigError: the environment names no folder for the socket.
    """

    def __init__(self, name: str, take: Callable[[Any], None]) -> None:
        self._name, self._take = name, take
        path = _path(name)
        path.unlink(missing_ok=True)  # of an earlier process
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._thread = threading.Thread(target=self._read, name="mailbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        send(self._name, None)
        self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        while (letter := json.loads(self._socket.recv(_MOST_BYTES))) is not None:
            attempt(self._take, letter)


def send(name: str, letter: object) -> None:
    """Sends a letter, which JSON can express, to the process of a model.

    The call waits while the process has many unread letters. If the process does not run, the
    letter is lost. The launcher restarts the server then, and all streams are over.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.sendto(json.dumps(letter).encode(), str(_path(name)))


def _path(name: str) -> Path:
    path = os.environ.get(ENGINE_VARIABLE)
    if not path:
        raise ConfigError(f"{ENGINE_VARIABLE}: not set; `token2wav serve` sets it")
    return Path(path).with_name(f"{name}.sock")
