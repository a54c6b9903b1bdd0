"""SIGTERM and Ctrl-C with open streams, and a failed start: audio to the end, and no leftovers."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import socket
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import TINY, GoldenSet
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.serve_command import WHOLE_BLOCKS, Serving, command, speak
from testkit.rigs.server_rig import Rig
from testkit.rigs.traces import Traces
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav import StreamConfig, Token2Wav
from token2wav_client import Client, ClientVoice, ServerError, ServerUnavailable
from token2wav_server.launcher import process as process_module
from token2wav_server.launcher.ports import Ports

STREAMS = 4


def take_terminal() -> None:
    """Makes standard input the controlling terminal of this process, as under a shell."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup


@contextmanager
def killed_in_the_end(arguments: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(arguments, **options) as process:
        try:
            yield process
        finally:
            process.kill()  # no effect on an ended process


def test_a_closed_terminal_drains(golden: GoldenSet, model: Token2Wav, voice: ClientVoice) -> None:
    """After SIGHUP, with output that can no longer be written, new streams are refused, and open
    streams play to their end.
    """
    tokens: NDArray[np.int32] = golden.tokens[:70]
    terminal, launchers_end = pty.openpty()
    ports = Ports.free()
    arguments = [*command(TINY, ports), f"--config={WHOLE_BLOCKS}", "--grace-seconds=300"]
    with killed_in_the_end(
        [*arguments, "--canary-seconds=0"],
        stdin=launchers_end,
        stdout=launchers_end,
        stderr=launchers_end,
        start_new_session=True,
        preexec_fn=take_terminal,
    ) as process:
        os.close(launchers_end)
        serving = Serving(process, ports)
        read = b""
        while b"token2wav: ready, " not in read:
            read += os.read(terminal, 1 << 16)
        traces = serving.traces
        speakers = speak(serving.url, voice, tokens, STREAMS, ends=False)
        os.close(terminal)  # the kernel sends SIGHUP
        while (completed := serving.health()).returncode == 0:
            pass
        assert completed.returncode == 6
        with (
            Client(serving.url) as client,
            pytest.raises(ServerError, match=r"^server: it is shutting down; try anot"),
        ):
            list(client.synthesize([[1]], voice))
        process.send_signal(signal.SIGHUP)  # as of a shell that ends, after the kernel's
        for speaker in speakers:
            speaker.may_end.set()
        for speaker in speakers:
            speaker.join()
            assert speaker.audio is not None, speaker.error
            expected = model.synthesize(tokens, golden.voice)
            assert np.abs(speaker.audio - expected).max() <= SERVER_EQUALS_LIBRARY
        assert serving.wait() == 0
    assert traces.remaining() == []


def test_a_server_under_nohup_ends_after_its_grace_time(
    golden: GoldenSet, voice: ClientVoice
) -> None:
    """Its start is summed up. It outlives its terminal, and cuts off streams that take too long."""
    options = ["--canary-seconds=0", "--grace-seconds=1"]
    with Serving.start(TINY, *options, inside=["nohup"]) as serving:
        printed = [serving.wait_for_line("")]
        while not printed[-1].startswith("token2wav: ready, "):
            printed.append(serving.wait_for_line(""))
        traces = serving.traces
        serving.process.send_signal(signal.SIGHUP)
        assert serving.health().returncode == 0
        speakers = speak(serving.url, voice, np.tile(golden.tokens, 10), STREAMS)
        began = time.monotonic()
        serving.process.send_signal(signal.SIGTERM)
        serving.wait_for_line("draining: new streams are refused, and open streams have 1 s")
        for speaker in speakers:
            speaker.join()
            assert isinstance(speaker.error, ServerUnavailable), speaker.error
        cut_off = f"token2wav serve: error: streams that were cut off: {STREAMS}"
        assert serving.wait_for_line("error") == cut_off
        assert serving.wait() == 5
        assert time.monotonic() - began >= 1
    assert traces.remaining() == []
    for port in vars(serving.ports).values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    lines = [line.removeprefix("token2wav: ") for line in printed if line.startswith("token2wav: ")]
    start, loading, warm_up, *parts, limits, ports = [
        line for line in lines if not line.startswith("not ready yet, after ")
    ]
    assert start.startswith(f"starting a server for {TINY}; of its log you see the warnings")
    assert (loading, warm_up) == (f"loading {TINY}", "warming up")
    assert parts == str(Token2Wav.load(TINY, stream=StreamConfig(first_tokens=0))).splitlines()
    assert (
        limits
        == "limits   64 streams, 32 of one client, 15000 tokens in each, 256 voices from clients"
    )
    assert ports.startswith(
        f"ready, gRPC {serving.url}, HTTP 127.0.0.1:{serving.ports.http}, metrics "
    )
    assert not [line for line in printed if "configuration" in line]


def test_an_idle_connection_does_not_hold_up_the_end(
    golden: GoldenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton waits for every open gRPC stream, and never unloads a model that a used one holds."""
    monkeypatch.setattr(process_module, "_GRACE_S", 2 * PATIENCE_SECONDS)
    monkeypatch.setattr(process_module, "_EXIT_TIMEOUT_S", int(2 * PATIENCE_SECONDS))
    with Rig.start(TINY, tmp_path) as rig, rig.connect() as connection:
        traces = Traces.of(rig.server.pid)
        assert connection.client.is_server_ready()
        keep_open = {"keep_open": True}
        connection.send(golden.tokens, golden.voice, 1, start=True, end=True, parameters=keep_open)
        assert connection.answers().chunks
        rig.wait_until_empty()
        assert rig.server.drain(PATIENCE_SECONDS) == 0
        began = time.monotonic()
        rig.server.stop()
        assert time.monotonic() - began < PATIENCE_SECONDS
    assert traces.remaining() == []
    log = (tmp_path / "triton.log").read_text()
    assert "failed to stop server" not in log
