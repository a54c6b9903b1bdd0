"""Drain of a server: it refuses new utterances and waits for open ones.

Triton cannot do it alone: after SIGTERM it lets open requests finish, but an utterance consists of many, and its next
one is refused. So the launcher first makes a file, which the model looks for when an utterance starts (`draining`),
waits until none is open, and sends SIGTERM then.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from token2wav_server.launcher.ports import fetched

VARIABLE = "TOKEN2WAV_DRAIN_FILE"
_POLL_S = 0.1
_GAUGE = re.compile(rb"^token2wav_open_streams\{[^}]*\} (\S+)$", re.MULTILINE)  # one for each part that holds it


def drain(file: Path, metrics_port: int, grace_s: float, server_ended: Callable[[], bool]) -> int:
    """Has new utterances refused by a file that the model looks for, and waits until the open ones have ended.

    Returns:
        Number of utterances that are lost: still open after ``grace_s``, or when the server ended.
    """
    deadline = time.monotonic() + grace_s
    file.touch()
    open_utterances = 0
    while True:
        time.sleep(_POLL_S)  # also lets an utterance that was just admitted show in the metrics
        if server_ended():
            return open_utterances
        if (told := fetched(metrics_port, "/metrics")) is not None:
            open_utterances = max((int(float(count)) for count in _GAUGE.findall(told)), default=0)
        if not open_utterances or time.monotonic() > deadline:
            return open_utterances


def draining() -> bool:
    """Says, inside a model process, whether its server drains; one that our launcher did not start never does."""
    file = os.environ.get(VARIABLE)
    return Path(file).exists() if file else False
