"""Draining: new utterances are refused while those that run may finish.

Triton cannot do it alone: after SIGTERM it lets open requests finish, but an utterance consists of many, and its next
one is refused. So the launcher first makes a file, which the model looks for when an utterance starts (`gate.py`),
waits until none is open, and sends SIGTERM then.
"""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

VARIABLE = "TOKEN2WAV_DRAIN_FILE"
_POLL_S = 0.1
_GAUGE = re.compile(rb"^token2wav_open_streams\{[^}]*\} (\S+)$", re.MULTILINE)  # one for each part that holds it


def drain(file: Path, metrics_url: str, grace_s: float, server_ended: Callable[[], bool]) -> int:
    """Has new utterances refused, and waits until the open ones have ended.

    Args:
        file: what the model looks for.
        metrics_url: HOST:PORT of the server's metrics.
        grace_s: how long to wait.
        server_ended: whether there is nobody left to wait for.

    Returns:
        Utterances that are lost: still open after ``grace_s``, or when the server ended.
    """
    deadline = time.monotonic() + grace_s
    file.touch()
    open_utterances = 0
    while True:
        time.sleep(_POLL_S)  # also lets an utterance that was just admitted show in the metrics
        if server_ended():
            return open_utterances
        open_utterances = _open_utterances(metrics_url, open_utterances)
        if not open_utterances or time.monotonic() > deadline:
            return open_utterances


def _open_utterances(metrics_url: str, last_known: int) -> int:
    try:
        with urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=2) as response:
            found = _GAUGE.findall(response.read())
    except OSError:
        return last_known
    return max((int(float(count)) for count in found), default=0)
