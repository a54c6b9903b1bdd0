"""Refuses new utterances while the server drains. Runs inside Triton's Python backend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from token2wav.errors import LimitError
from token2wav_server.launcher.drain import VARIABLE
from token2wav_server.protocol import Position, TritonReply


class Gate:
    """Lets requests pass, except those that start an utterance while the file in TOKEN2WAV_DRAIN_FILE exists.

    A server that was started by anything but our launcher has no such variable, and never drains.
    """

    def __init__(self) -> None:
        file = os.environ.get(VARIABLE)
        self._file = Path(file) if file else None

    def admits(self, request: Any) -> bool:
        """Whether the request may go on; else it has been answered."""
        if self._file is None or not Position.of(request).start or not self._file.exists():
            return True
        TritonReply(request).fail(LimitError("server: it is shutting down; try another one"))
        return False
