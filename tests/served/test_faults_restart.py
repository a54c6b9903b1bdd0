"""The process of the model dies or hangs: streams end with an error at once, and the server serves
again by itself.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit.models.golden import ROOT, TINY, GoldenSet
from testkit.patience import until
from testkit.rigs.serve_command import Serving, speak
from tests.served.conftest import RESPONSE_SECONDS
from token2wav.commands import main
from token2wav_client import ClientVoice, TransientServerError

STREAMS = 8
# far below the silence that a client bears; seen: 0.5 on an idle machine
QUICKLY_SECONDS = RESPONSE_SECONDS / 2
MUTE_MODEL = """
class TritonPythonModel:
    def initialize(self, args):
        print("mute", flush=True)

    def execute(self, requests):
        self.open = [request.get_response_sender() for request in requests]
"""


def canary_options(seconds: float) -> list[str]:
    return [f"--canary-seconds={seconds}", f"--canary-patience-seconds={seconds}"]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving.ready(TINY, *canary_options(10)) as serving:
        yield serving


@pytest.mark.parametrize("audio_format", ["float32", "int16"])
def test_healthy(serving: Serving, audio_format: str) -> None:
    completed = serving.health(f"--audio-format={audio_format}")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("healthy: first audio after ")
    # The warning about streams without a key is for clients, and the canary sends a key.
    assert not [line for line in serving.printed if "stream_key" in line]


def test_engine_killed_in_the_middle_of_eight_streams(
    serving: Serving, golden: GoldenSet, voice: ClientVoice
) -> None:
    """The engine alone is restarted, so that ports and connections stay open."""
    speakers = speak(serving.url, voice, np.tile(golden.tokens, 10), STREAMS)
    before = serving.traces
    killed_at = time.monotonic()
    os.kill(before.engine, signal.SIGKILL)
    for speaker in speakers:
        speaker.join(2 * QUICKLY_SECONDS)
        assert isinstance(speaker.error, TransientServerError), speaker.error
        assert str(speaker.error) == "engine: its process has ended; send the utterance again"
        assert speaker.ended_at - killed_at < QUICKLY_SECONDS
    assert serving.wait_for_line("restart") == (
        "token2wav: the engine was killed by signal SIGKILL; restarting the engine"
    )
    serving.wait_for_line("token2wav: ready again with a new engine, ")
    after = serving.traces
    assert after.processes[:2] == before.processes[:2]
    assert after.engine not in before.processes
    until(lambda: serving.open_streams() == 0)
    assert serving.health().returncode == 0


def test_hanging(serving: Serving, golden: GoldenSet, voice: ClientVoice) -> None:
    before = serving.traces
    os.kill(before.engine, signal.SIGSTOP)
    line = serving.wait_for_line("restart")
    assert line.startswith("token2wav: the model does not work: ")
    assert "restarting the engine" in line
    serving.wait_for_line("token2wav: ready again with a new engine, ")
    assert serving.traces.engine != before.engine
    [speaker] = speak(serving.url, voice, golden.tokens, streams=1)
    speaker.join()
    assert speaker.audio is not None
    assert len(speaker.audio) == 960 * len(golden.tokens)


def test_an_engine_that_cannot_start_again_costs_the_server(tmp_path: Path) -> None:
    """A restart of the whole server is tried before the command gives up."""
    model = shutil.copytree(TINY, tmp_path / "model")
    with Serving.ready(model) as serving:
        traces = serving.traces
        (model / "flow.safetensors").unlink()
        os.kill(traces.engine, signal.SIGKILL)
        serving.wait_for_line("SIGKILL; restarting the engine")
        assert "the engine ended with status 3: " in serving.wait_for_line("restarting the server")
        serving.wait_for_line("token2wav serve: error: the server could not start: the engine")
        assert serving.wait() == 3
    assert traces.remaining() == []


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "(status 137): "),
        (signal.SIGSEGV, "(status 139): tritonserver was killed by SIGSEGV; restarting the server"),
    ],
)
def test_triton_itself_killed(serving: Serving, number: signal.Signals, reason: str) -> None:
    """Six requests of one client once ended the service for all clients."""
    before = serving.traces
    os.kill(before.processes[1], number)
    assert f"the server ended by itself {reason}" in serving.wait_for_line("restart")
    serving.wait_for_line("token2wav: ready, ")
    assert before.remaining() == []
    assert serving.health().returncode == 0


def test_reaper_killed(serving: Serving) -> None:
    before = serving.traces
    os.kill(before.processes[0], signal.SIGKILL)
    line = serving.wait_for_line("restart")
    assert line.startswith(  # and a pause if an earlier restart is less than a minute old
        "token2wav: the server ended by itself (status -9): the reaper, which is the parent of "
        "tritonserver, was "
        "killed by SIGKILL; restarting the server"
    )
    serving.wait_for_line("token2wav: ready, ")
    assert before.remaining() == [], "no process outlives its server"
    assert serving.health().returncode == 0


def test_a_model_that_never_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its process is alive, and Triton reports that it is ready. A restart would not help."""
    # another server may write there at this moment
    unwritten = shutil.ignore_patterns("__pycache__")
    repository = shutil.copytree(
        ROOT / "model_repository", tmp_path / "repository", ignore=unwritten
    )
    (repository / "token2wav" / "1" / "model.py").write_text(MUTE_MODEL)
    options = ["--model-repository", str(repository), *canary_options(5)]
    with Serving.start(TINY, *options) as serving:
        # In this process: on a busy machine another begins to ask only when the canary has given
        # the server up.
        serving.wait_for_line("^mute")
        traces = serving.traces
        while (status := main(["health", "--url", serving.url, "--timeout=1"])) == 3:
            assert serving.process.poll() is None
            capsys.readouterr()
        error = capsys.readouterr().err
        assert status == 5, error
        # On a busy machine its time may be over before Triton has even said that the model is
        # there.
        late = r"the server (did not synthesize 3 tokens within|at \S+ did not respond for) \S+ s"
        assert re.search(f"{late}$", error, re.MULTILINE)
        line = serving.wait_for_line("error|ready")
        assert re.match(f"token2wav serve: error: the model does not work: {late}", line)
        assert serving.wait() == 3
    assert traces.remaining() == []
