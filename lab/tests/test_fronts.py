"""Servers in turns: the ideal server on simulated time, the figures, and the command line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load.subject import Subject
from lab.fronts import SETTINGS, Load, Script, Server, Spoken, cpu_seconds, row, servers_of
from testkit.models.golden import TINY
from token2wav import RuntimeConfig, Token2Wav, Voice


@pytest.fixture(scope="module")
def script() -> Script:
    """Utterance of 200 tokens in messages of 5, five in a second."""
    return Script.of(Subject.of(TINY, 8.0), Load.of("3x5x5"), SETTINGS)


def test_the_ideal_server_sends_the_chunks_of_the_library_when_their_tokens_arrive(
    script: Script,
) -> None:
    subject = Subject.of(TINY, 8.0)
    model = Token2Wav.load(TINY, runtime=RuntimeConfig(backend="pause"))
    now, expected = 0.0, []
    model.pipeline.clock = lambda: now
    sent = subject.voice
    assert sent is not None
    voice = Voice(sent.prompt_tokens, sent.prompt_mel, sent.speaker_embedding)
    with model.stream(voice) as stream:
        for number, portion in enumerate(np.split(subject.tokens, 40)):
            now = 0.2 * number
            take = stream.finish if number == 39 else stream.push
            expected += [(now, chunk.duration_s) for chunk in take(portion)]
    times_s, durations_s = np.array(expected).T
    assert script.ideal_s[0] == pytest.approx([times_s[0], durations_s[0]])
    assert script.ideal_s[-1] == pytest.approx([times_s[-1], 8.0])
    assert script.late_s(times_s + 0.5, durations_s) == pytest.approx(
        [0.5] * len(expected), abs=0.2
    )


def test_figures_of_servers(script: Script) -> None:
    load, (times_s, ends_s) = Load.of("3x5x5"), script.ideal_s.T
    durations_s = np.diff(ends_s, prepend=0).tolist()
    spoken = [
        Spoken((times_s + late_s).tolist(), durations_s, 40, 16.0, [0.001], 7)
        for late_s in (-1.0, 0.25)  # early audio is not late
    ]
    spoken.append(Spoken(answered=20, ended_at=15.0, error="no answer"))
    result = row(load, script, spoken, 6.0, {"clients": 0.5, "triton": 0.2})
    assert (result["messages_per_s"], result["offered_messages_per_s"]) == (10, 11)
    assert result["first_audio_late_ms"]["p50"] == 125.0
    assert result["chunk_late_ms"]["max"] == 250.0
    assert (result["errors"], result["checksums"]) == ({"no answer": 1}, [7])
    assert result["cpu_ms_per_message"] == {"clients": 5.0, "triton": 2.0}
    assert result["clients_share_of_a_core"] == 0.05
    assert result["client_lag_ms"]["p99"] == 1.0


def test_loads_and_servers_of_the_command_line(tmp_path: Path) -> None:
    load = Load.of("400x2.5x5/instant")
    assert (load.clients, load.client_messages_per_s, load.tokens, load.instant) == (
        400,
        2.5,
        5,
        True,
    )
    runtime = {"backend": "pause", "workers": 1, "pause_batch_ms": 0, "pause_token_ms": 0}
    assert load.settings(SETTINGS) == {**SETTINGS, "runtime": runtime}
    with pytest.raises(ValueError, match="'80x25' is no load, such as 80x25x1"):
        Load.of("80x25")
    (tmp_path / "python").touch()
    python = tmp_path / "python"
    assert servers_of([f"old={python}", f"new={python}@native"]) == {
        "old": Server(python),
        "new": Server(python, "native"),
    }
    with pytest.raises(ValueError, match="nowhere: there is no such interpreter"):
        servers_of(["old=nowhere"])


def test_the_cpu_time_of_a_server_is_of_its_processes() -> None:
    before = cpu_seconds(os.getpid())["launcher"]
    while os.times().user - before < 0.05:
        pass
    assert cpu_seconds(os.getpid())["launcher"] > before
