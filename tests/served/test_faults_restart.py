"""The process of the model dies or hangs: streams end with an error at once, and the server serves
again by itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit.models.golden import TINY, GoldenSet
from testkit.patience import until
from testkit.rigs.metrics import scrape
from testkit.rigs.serve_command import Serving, speak
from tests.served.conftest import RESPONSE_SECONDS
from token2wav_client import ClientVoice, TransientServerError

STREAMS = 8
# far below the silence that a client bears; seen: 0.5 on an idle machine
QUICKLY_SECONDS = RESPONSE_SECONDS / 2


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving.ready(TINY, "--canary-seconds=10", "--canary-patience-seconds=10") as serving:
        yield serving


def test_the_canary_is_measured_and_sends_a_key(serving: Serving) -> None:
    until(lambda: scrape(serving.metrics_url)["token2wav_canary_seconds"] > 0)
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
