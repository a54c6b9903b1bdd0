"""`token2wav synth`, run as a user runs it, with a server."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from testkit.models.golden import DATA
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.door_server import DoorServer
from testkit.rigs.processes import finished
from testkit.rigs.serve_command import synth

VOICE = str(DATA / "demo" / "voice.safetensors")
TOKENS = np.load(DATA / "demo" / "tokens.npy")[:60]


def test_samples_on_standard_output(rig: DoorServer, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, TOKENS)
    spoken = synth(rig.server.grpc_url, f"--tokens={tokens}", f"--voice={VOICE}", "--out=-")
    floats = finished(*spoken, "--audio-format=float32", text=False)
    assert floats.returncode == 0, floats.stderr
    assert len(floats.stdout) == 4 * 960 * len(TOKENS)
    assert b"time to first audio" in floats.stderr
    integers = finished(*spoken, "--quiet", text=False)
    assert integers.returncode == 0
    assert integers.stderr == b""
    difference = np.frombuffer(floats.stdout, "<f4") - np.frombuffer(
        integers.stdout, "<i2"
    ) / np.float32(32767)
    assert np.abs(difference).max() < 1e-3


def test_nobody_reads_standard_output(rig: DoorServer, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, TOKENS)
    arguments = [f"--tokens={tokens}", f"--voice={VOICE}", "--quiet", "--out=-"]
    command = f"{' '.join(synth(rig.server.grpc_url, *arguments))} | true; exit ${{PIPESTATUS[0]}}"
    done = finished("bash", "-c", command)
    assert done.returncode == 2
    error = "token2wav synth: error: out: cannot write to standard output (Broken pipe)\n"
    assert done.stderr == error


def rests(file: Path) -> bool:
    """Returns whether a file has audio and does not grow."""
    before = file.stat().st_size if file.exists() else 0
    time.sleep(0.5)
    return file.exists() and 2 * 960 < before == file.stat().st_size


def test_a_terminated_command_reports_the_written_audio(rig: DoorServer, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    arguments = ["--tokens=-", f"--voice={VOICE}", f"--out={out}", "--quiet"]
    with subprocess.Popen(
        synth(rig.server.grpc_url, *arguments),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        process.stdin.write("".join(f"<|s_{token}|>" for token in TOKENS).encode())
        process.stdin.flush()  # and the utterance stays open
        until(lambda: rests(out))
        process.terminate()
        assert process.stderr is not None
        errors = process.stderr.read().decode()
        assert process.wait(PATIENCE_SECONDS) == 143
    seconds = soundfile.info(out).duration
    assert (
        errors
        == f"{out}: incomplete, {seconds:.2f} s of audio written\ntoken2wav synth: terminated\n"
    )


def test_a_full_disk_is_named(rig: DoorServer, tmp_path: Path) -> None:
    out = tmp_path / "out.flac"
    arguments = [f"--tokens={DATA}/demo/tokens.npy", f"--voice={VOICE}", "--quiet", f"--out={out}"]
    command = f"ulimit -f 20; {' '.join(synth(rig.server.grpc_url, *arguments))}"
    done = finished("bash", "-c", command)
    assert done.returncode == 2
    error = f"token2wav synth: error: {out}: cannot write (File too large)"
    assert done.stderr.splitlines()[-1] == error
    assert 1000 < out.stat().st_size <= 20 * 1024


@pytest.mark.parametrize("name", ["tokens.npy", "-"])
def test_an_error_in_tokens_names_their_file(rig: DoorServer, tmp_path: Path, name: str) -> None:
    source, out = str(tmp_path / name), tmp_path / "out.wav"
    np.save(tmp_path / "tokens.npy", np.array([6561, 1], np.int32))
    tokens = "-" if name == "-" else source
    arguments = [f"--tokens={tokens}", f"--voice={VOICE}", f"--out={out}", "--rate=500"]
    done = finished(*synth(rig.server.grpc_url, *arguments), input="6561 1")
    named = "standard input" if name == "-" else source
    message = "tokens: 6561 at index 0 is outside the vocabulary 0 to 6560"
    assert done.stderr == f"token2wav synth: error: {named}: {message}\n"
    assert done.returncode == 4
    assert not out.exists()


def test_the_audio_before_a_refused_token_is_kept(rig: DoorServer, tmp_path: Path) -> None:
    source, out = tmp_path / "tokens.npy", tmp_path / "out.wav"
    np.save(source, np.array([1, 2, 6561], np.int32))
    done = finished(
        *synth(rig.server.grpc_url, f"--tokens={source}", f"--voice={VOICE}", f"--out={out}")
    )
    assert done.stderr == (
        f"{out}: incomplete, 0.08 s of audio written\ntoken2wav synth: error: {source}: "
        "tokens: 6561 at index 2 is outside the vocabulary 0 to 6560\n"
    )
    assert soundfile.info(out).frames == 2 * 960


def test_a_limit_that_ends_the_utterance_is_reported(rig: DoorServer, tmp_path: Path) -> None:
    source, out = tmp_path / "tokens.npy", tmp_path / "out.wav"
    np.save(source, np.concatenate((TOKENS, np.full(200, TOKENS[-1]))))
    arguments = [f"--tokens={source}", f"--voice={VOICE}", f"--out={out}", "--end-after-repeats=8"]
    done = finished(*synth(rig.server.grpc_url, *arguments))
    seconds = (len(TOKENS) + 7) / 25
    assert soundfile.info(out).duration == seconds
    assert done.stdout.splitlines()[-1] == "ended by the server  repeats"
    reason = f"after {seconds:.2f} s of audio: equal tokens in a row"
    assert done.stderr.strip().endswith(f"the server ended the utterance {reason}")
