"""A program that exits after an utterance, however it ended, leaves no call of gRPC alive.

The destructor of a call takes a lock. If a call lives until the interpreter exits, the thread of
gRPC that holds the lock may have stopped for good, and the program hangs. That happened in one exit
of a hundred on a busy machine, so the test counts the calls.
"""

from __future__ import annotations

import sys

import pytest

from testkit.models.golden import DATA
from testkit.rigs.door_server import DoorServer
from testkit.rigs.processes import finished

START = f"""
import atexit, gc, sys
from grpc import Call
import numpy as np
atexit.register(lambda: print(sum(isinstance(thing, Call) for thing in gc.get_objects())))
from token2wav_client import Client, ClientError, ClientVoice  # closes its clients before the count
tokens, voice = np.arange(60), ClientVoice.load({str(DATA / "demo" / "voice.safetensors")!r})
client = Client(sys.argv[1])
"""
KEPT_ERROR = """
try:
    for chunk in client.synthesize([tokens], {voice}): pass
except ClientError as error:
    kept = error
assert {words!r} in str(kept)
"""
PROGRAMS = {
    "complete": "for chunk in client.synthesize([tokens], voice): pass",
    "left early": "for chunk in client.synthesize([tokens] * 10, voice): break",
    "left open": "utterance = client.open(voice); utterance.push(tokens); next(utterance)",
    "cancelled": "utterance = client.open(voice); utterance.push(tokens); utterance.cancel()",
    "refused": KEPT_ERROR.format(voice="'0' * 64", words="is not registered"),
    "late": "client = Client(sys.argv[1], response_timeout_s=0.001)"
    + KEPT_ERROR.format(voice="voice", words="did not respond"),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_no_call_outlives_the_program(rig: DoorServer, program: str) -> None:
    completed = finished(sys.executable, "-c", START + program, rig.server.grpc_url)
    assert (completed.stdout, completed.stderr, completed.returncode) == ("0\n", "", 0)
