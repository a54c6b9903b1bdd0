"""Client command: arguments, messages and exit codes.

The tests in tests/served run it against a server that synthesizes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

from testkit.limits import files_of_at_most
from testkit.patience import PATIENCE_SECONDS, until
from testkit.tables import table
from token2wav.commands import main
from token2wav_client import (
    AsyncClient,
    AudioChunk,
    Client,
    ClientVoice,
    InputError,
    OutputError,
    ServerError,
    ServerUnavailable,
)
from token2wav_client.stats import print_report


@pytest.fixture
def voice(voice_file: Path) -> str:
    return str(voice_file)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens.txt"
    path.write_text("<|s_1|><|s_2|>")
    return str(path)


@pytest.fixture
def free_url() -> str:
    """Returns an address without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return url_of(probe)


@pytest.fixture
def mute_port() -> Iterator[socket.socket]:
    """Port of a listener that accepts connections and never sends a byte."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def url_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert re.match(r"token2wav (synth|health|bench|perf-data): error: ", line)
    return line


# Arguments that no server is asked for; those of `synth` follow arguments that are right.
REFUSED = table(
    """
synth | --tokens=no.npy | no.npy: cannot read tokens
synth | --voice=no.npz | no.npz: cannot read the voice
synth | --token-file=no.txt | token-file: cannot read no.txt
synth | --out=no/such/folder/o.wav | no/such/folder/o.wav
synth | --out=out.mp3 | out.mp3: the name ends in none of .wav,
synth | --url=http://localhost:8001 | url: 'http://localhost:8001' is not host:port
synth | --voice-id=abc | voice id: 'abc' is not 64 hexadecimal digits
synth | --voice-name= | voice: '' is neither a voice id nor a valid voice name
health | --ca=nowhere.pem | ca: cannot use nowhere.pem
health | --cert=nowhere.pem | key: missing
health | --token-file=nowhere | token-file: cannot read nowhere
health | --token-file=/dev/null | token-file: /dev/null is empty
health | --header=x-key= --tls | headers, x-key: expected printable ASCII
bench | --tokens=none.npy | none.npy: cannot read tokens
bench | --voice=none.npz | none.npz: cannot read the voice
bench | --out=none/bench.json | bench.json: cannot be written
bench | --out=bench.png | bench.png: is the name of the picture
bench | --recordings=none.json | none.json: cannot read recordings
perf-data | --out=none/data.json | data.json: cannot be written
perf-data | --tokens={none} | tokens: 0 found; an utterance needs at least 1
perf-data | --tokens={codes} | codes.json: tokens: shape (3, 2), but prompt_tokens of
"""
)


@pytest.mark.parametrize(("program", "options", "message"), REFUSED)
def test_unusable_arguments_are_named_once_and_at_once(
    program: str,
    options: str,
    message: str,
    tmp_path: Path,
    voice: str,
    tokens: str,
    free_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (none := tmp_path / "none.txt").write_text(" ")
    (codes := tmp_path / "codes.json").write_text("[[1, 2], [3, 4], [5, 6]]")
    out = tmp_path / "out.wav"
    given = [] if program == "perf-data" else [f"--url={free_url}"]
    if program in ("synth", "perf-data"):
        given += [f"--tokens={tokens}", f"--out={out}"]
        given += [] if "--voice" in options else [f"--voice={voice}"]
    assert main([program, *given, *options.format(none=none, codes=codes).split()]) == 2
    assert one_sentence(capsys).count(message) == 1
    assert not out.exists()


def test_the_options_of_synth_are_those_of_the_client(
    tmp_path: Path, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def synthesize(
        client: Client, pieces: Iterator[Any], voice: Any, **options: Any
    ) -> Iterator[AudioChunk]:
        asked.update(options, tokens=[np.asarray(piece).tolist() for piece in pieces], voice=voice)
        yield AudioChunk(np.zeros(8, np.uint8), 0, True, 0, 0, None, sample_rate=8000)

    monkeypatch.setattr(Client, "synthesize", synthesize)
    given = {
        "--audio-format": "mulaw",
        "--steps": "3",
        "--sample-rate": "8000",
        "--decoder-noise": "off",
        "--end-after-repeats": "8",
        "--end-after-silence": "2",
        "--speed": "1.25",
    }
    arguments = [word for pair in given.items() for word in pair]
    files = [f"--tokens={tokens}", f"--out={tmp_path / 'out.wav'}"]
    assert main(["synth", *files, "--codebooks=2", f"--voice-id={'0' * 64}", *arguments]) == 0
    assert asked == {
        "audio_format": "mulaw",
        "steps": 3,
        "sample_rate": 8000,
        "decoder_noise": False,
        "end_after_repeats": 8,
        "end_after_silence_s": 2.0,
        "speed": 1.25,
        "tokens": [[[1, 2]]],
        "voice": "0" * 64,
    }


@pytest.mark.parametrize(
    ("file", "most_bytes", "lost", "written"),
    [
        ("out.wav", 7_000, False, ", 0.10 s of audio written"),
        ("out.flac", 1_000_000, True, ", 0.20 s of audio written"),
        # The disk has no room for the last bytes, which are written when the file is closed.
        ("out.flac", 9_000, False, ""),
        ("out.flac", 9_000, True, ""),
    ],
)
def test_an_incomplete_file_is_reported_with_the_audio_in_it(
    file: str,
    most_bytes: int,
    lost: bool,
    written: str,
    tokens: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def synthesize(*_: Any, **options: Any) -> Iterator[AudioChunk]:
        noise = np.random.default_rng(0).integers(-32768, 32768, (2, 2400), np.int16)
        yield from (AudioChunk(audio, 0, True, 0, 0, None) for audio in noise)
        if lost:
            raise ServerUnavailable("the connection was lost")

    monkeypatch.setattr(Client, "synthesize", synthesize)
    out = tmp_path / file
    with files_of_at_most(most_bytes):
        assert main(["synth", f"--tokens={tokens}", f"--out={out}", "--quiet"]) != 0
    assert capsys.readouterr().err.startswith(f"{out}: incomplete{written}\n")


@pytest.mark.parametrize(
    ("message", "option", "shown"),
    [
        ("tokens: shape (5, 2), expected 1 dimension", "tokens", "tokens: shape (60, 2), expected"),
        ("latents: sent, but this model takes no latents", "tokens", "latents: sent, but this"),
        (
            "speaker_embedding: shape (9,), expected (192,)",
            "voice",
            "speaker_embedding: shape (9,)",
        ),
    ],
)
def test_a_refused_input_is_named_by_its_file(
    message: str,
    option: str,
    shown: str,
    tmp_path: Path,
    voice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The shape is that of the file, not of the request with a part of its tokens."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ServerError(message)

    monkeypatch.setattr(Client, "synthesize", refuse)
    files = {"tokens": str(tmp_path / "tokens.npy"), "voice": voice, "out": str(tmp_path / "o.wav")}
    np.save(files["tokens"], np.ones((60, 2), np.int32))
    assert main(["synth", *(f"--{name}={file}" for name, file in files.items())]) == 4
    assert f"error: {files[option]}: {shown}" in one_sentence(capsys)


def test_nobody_at_the_address_exits_with_3(
    tmp_path: Path, voice: str, tokens: str, free_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.wav"
    arguments = [f"--tokens={tokens}", f"--voice={voice}", f"--out={out}", f"--url={free_url}"]
    assert main(["synth", *arguments]) == 3
    assert f"no server at {free_url}" in one_sentence(capsys)
    assert not out.exists()
    assert main(["health", "--url", free_url]) == 3
    assert f"no server at {free_url}" in one_sentence(capsys)


def test_a_mute_port_exits_with_3_after_the_connect_timeout(
    mute_port: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of(mute_port)
    took = []
    for _ in range(3):  # a busy machine may stall in one attempt
        began = time.monotonic()
        assert main(["health", "--url", url, "--connect-timeout", "0.3"]) == 3
        took.append(time.monotonic() - began)
        assert f"the server at {url} accepts connections but does not respond" in one_sentence(
            capsys
        )
    assert min(took) < 5  # the default


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_ends_it_without_a_traceback(
    tmp_path: Path,
    voice: str,
    mute_port: socket.socket,
    number: signal.Signals,
    status: int,
    message: str,
) -> None:
    # A shell that runs the tests in the background makes its children ignore SIGINT.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "token2wav"]
    command += ["synth", "--tokens", "-", "--voice", voice, "--out", str(tmp_path / "out.wav")]
    command += ["--url", url_of(mute_port), "--connect-timeout", f"{PATIENCE_SECONDS}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        mute_port.settimeout(PATIENCE_SECONDS)
        connection, _ = mute_port.accept()  # it is up and waits for the server
        with connection:
            process.send_signal(number)
            _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == status
    assert errors == f"token2wav synth: {message}\n"


def test_a_report_that_cannot_be_written() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe, Path("/dev/full").open("w") as full:
        for output, number in ((pipe, errno.EPIPE), (full, errno.ENOSPC)):
            message = re.escape(f"report: cannot be written ({os.strerror(number)})")
            with pytest.raises(OutputError, match=f"^{message}$"):
                print_report("words", output)


def test_the_id_of_a_voice_file(
    voice: str, voice_arrays: dict[str, npt.NDArray[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["voice-id", voice]) == 0
    assert capsys.readouterr().out == ClientVoice(**voice_arrays).id + "\n"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_wrong_option_is_an_error_of_the_call(
    kind: type[Client] | type[AsyncClient], free_url: str
) -> None:
    async def call() -> None:
        client = kind(free_url)
        with pytest.raises(TypeError, match="'sample_rat'"):
            client.synthesize([[1]], "anna", sample_rat=8000)  # type: ignore[call-arg]
        with pytest.raises(InputError, match="steps: 0 is outside"):
            client.synthesize([[1]], "anna", steps=0)
        closing = client.close()
        if closing is not None:
            await closing

    asyncio.run(call())


def test_a_client_without_a_server_leaves_no_threads(
    free_url: str, voice_arrays: dict[str, npt.NDArray[Any]]
) -> None:
    before = set(threading.enumerate())
    with Client(free_url) as client:
        with pytest.raises(ServerUnavailable, match=free_url):
            list(client.synthesize([[1, 2, 3]], ClientVoice(**voice_arrays)))
        with pytest.raises(ServerUnavailable, match=free_url):
            client.health()
    until(lambda: set(threading.enumerate()) <= before)  # gRPC's end a moment later
