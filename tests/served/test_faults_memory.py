"""A flood of HTTP/2 frames fills tritonserver's memory: the launcher drains and restarts it."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator

import numpy as np

from testkit.models.golden import TINY, GoldenSet
from testkit.rigs.raw_grpc import CONTINUATION, HEADERS, PREFACE, SETTINGS, STREAM, frame
from testkit.rigs.serve_command import Serving, speak
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from tests.server.launcher.test_front import status_of
from token2wav import Token2Wav
from token2wav_client import ClientVoice
from token2wav_server.launcher.ports import Ports

ROOM_MIB = 200
FLOOD_BYTES = 2 << 30  # far more than needed: Triton 2.51 keeps 2.2 bytes of memory for each


def test_a_flood_of_headers(golden: GoldenSet, model: Token2Wav, voice: ClientVoice) -> None:
    """A bound that is too small at the start is an error, which names the usual memory."""
    with Serving.start(TINY, "--memory-mib=1", "--canary-seconds=0") as refused:
        error = refused.wait_for_line("error")
        assert refused.wait() == 3
    usual = re.fullmatch(
        r"token2wav serve: error: the server takes (\d+) MiB of memory, more than --memory-mib=1 "
        "at its start; raise the limit",
        error,
    )
    assert usual, error
    status_port = Ports.free().http
    bound_mib = int(usual[1]) + ROOM_MIB
    options = [
        f"--memory-mib={bound_mib}",
        f"--status-port={status_port}",
        "--canary-seconds=0",
        "--grace-seconds=600",
    ]
    with Serving.ready(TINY, *options) as serving:
        before = serving.traces
        [speaker] = speak(serving.url, voice, golden.tokens, streams=1, ends=False)
        with flooded(serving.ports.grpc):
            line = serving.wait_for_line("draining")
        assert (
            f" MiB of memory, more than --memory-mib={bound_mib}; draining: new streams are refused"
            in line
        )
        assert status_of(status_port) == (404, b"draining\n")
        speaker.may_end.set()
        speaker.join()
        assert speaker.audio is not None, speaker.error
        expected = model.synthesize(golden.tokens, golden.voice)
        assert np.abs(speaker.audio - expected).max() <= SERVER_EQUALS_LIBRARY
        assert f"--memory-mib={bound_mib}; restarting the server" in serving.wait_for_line(
            "restarting"
        )
        serving.wait_for_line("token2wav: ready, ")
        assert before.remaining() == []
        assert serving.health().returncode == 0


@contextlib.contextmanager
def flooded(port: int) -> Iterator[None]:
    """Sends headers without end, in CONTINUATION frames, until the body of the context is over."""
    over = threading.Event()

    def flood() -> None:
        frames = frame(CONTINUATION, 0, STREAM, b"\0\1x\x32" + b"y" * 50) * 10_000
        for _ in range(FLOOD_BYTES // len(frames)):
            if over.is_set():
                return
            # closed by this test, or by a Triton that bounds headers
            with contextlib.suppress(OSError):
                connection.sendall(frames)

    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        # :method POST and :scheme http out of HPACK's own table, and a path without a name of the
        # table.
        connection.sendall(frame(HEADERS, 0, STREAM, b"\x83\x86\x04\x02/x"))
        thread = threading.Thread(target=flood)
        thread.start()
        try:
            yield
        finally:
            over.set()
            connection.shutdown(socket.SHUT_RDWR)
            thread.join()
