"""Samples for a pipe and for a loudspeaker. With a server: tests/served/test_client_examples.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from token2wav.commands import main
from token2wav_client import OutputError
from token2wav_client.player import Player
from token2wav_client.writer import FILE_FORMATS


@pytest.mark.parametrize("file_format", FILE_FORMATS)
def test_a_full_device_behind_standard_output_is_named(file_format: str) -> None:
    code = (
        "from token2wav_client.writer import AudioWriter; import numpy\n"
        f"with AudioWriter('-', file_format={file_format!r}) as writer: "
        f"writer.write(numpy.zeros(9, 'f4'))"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    *_, last_line = done.stderr.splitlines()
    assert last_line.endswith(
        "OutputError: out: cannot write to standard output (No space left on device)"
    )
    assert "callback" not in done.stderr


@pytest.mark.parametrize(
    "wrong", ["terminal", "format", "sounddevice", "portaudio", "device", "nothing"]
)
def test_unusable_arguments_are_refused_before_a_connection(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    voice = tmp_path / "voice.npz"
    np.savez(
        voice,
        prompt_tokens=np.zeros(0, np.int32),
        prompt_mel=np.zeros((0, 80), np.float32),
        speaker_embedding=np.ones(192, np.float32),
    )
    arguments = {
        "terminal": ["--out", "-"],
        "format": ["--out", str(tmp_path / "out.mp3")],
        "nothing": [],
    }.get(wrong, ["--play"])
    message = {
        "terminal": "out: standard output is a terminal; pipe the samples",
        "format": "out.mp3: the name ends in none of .wav, ",
        "sounddevice": "play: the library sounddevice is missing; run: pip install",
        "portaudio": "play: sounddevice does not find PortAudio; run: apt-get install",
        "device": "play: no audio device can play 24000 Hz (none)",
        "nothing": "one of the arguments --out --play is required",
    }[wrong]
    if wrong == "terminal":
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    elif wrong == "sounddevice":
        monkeypatch.setitem(sys.modules, "sounddevice", None)
    elif wrong == "portaudio":
        monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')")
    elif wrong == "device":
        monkeypatch.setitem(sys.modules, "sounddevice", Loudspeaker(broken=True))
    command = ["synth", "--tokens=/dev/null", f"--voice={voice}", "--url=127.0.0.1:1", *arguments]
    try:
        status = main(command)
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert message in capfd.readouterr().err


class Loudspeaker(ModuleType):
    """Stand-in for the sound library, because a test machine has no sound device."""

    class PortAudioError(Exception):
        pass

    def __init__(self, *, broken: bool) -> None:
        super().__init__("sounddevice")
        self.broken = broken
        self.heard: list[Any] = []
        self.calls: list[str] = []
        self.rates: list[int] = []
        self.channels: list[int] = []

    def OutputStream(self, **format: Any) -> Loudspeaker:
        if self.broken:
            raise self.PortAudioError("none")
        assert format["dtype"] == "int16"
        self.rates.append(format["samplerate"])
        self.channels.append(format["channels"])
        return self

    def write(self, samples: Any) -> None:
        if self.broken:
            raise self.PortAudioError("unplugged")
        self.heard.append(samples)

    def __getattr__(self, name: str) -> Any:
        if name not in ("start", "stop", "abort", "close"):
            raise AttributeError(name)
        return lambda: self.calls.append(name)


def test_playing(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Loudspeaker(broken=False)
    monkeypatch.setitem(sys.modules, "sounddevice", speaker)
    with Player("mulaw") as player:
        player.write(np.array([255, 128, 0], np.uint8))
    assert speaker.heard[0].ravel().tolist() == [0, 32124, -32124]
    assert speaker.heard[0].shape == (3, 1)
    assert speaker.calls == ["start", "stop", "close"]  # stop waits until all audio has been played
    assert (speaker.rates, speaker.channels) == ([24_000], [1])
    with Player("int16") as player:
        speaker.broken = True
        with pytest.raises(OutputError, match=r"play: the audio device failed \(unplugged\)"):
            player.write(np.arange(3, dtype=np.int16))


def test_playing_at_the_rate_of_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Loudspeaker(broken=False)
    monkeypatch.setitem(sys.modules, "sounddevice", speaker)
    with Player("int16") as player:
        for _ in range(2):
            player.write(np.arange(3, dtype=np.int16), 16_000)
    assert speaker.rates == [24_000, 16_000]
    assert speaker.calls == ["start", "stop", "close", "start", "stop", "close"]


def test_playing_two_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker, audio = Loudspeaker(broken=False), np.arange(6, dtype=np.int16).reshape(3, 2)
    monkeypatch.setitem(sys.modules, "sounddevice", speaker)
    with Player("int16") as player:
        for _ in range(2):
            player.write(audio)
    assert (speaker.rates, speaker.channels) == ([24_000, 24_000], [1, 2])
    assert all(np.array_equal(heard, audio) for heard in speaker.heard)


def test_playing_stops_at_once_when_something_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Loudspeaker(broken=False)
    monkeypatch.setitem(sys.modules, "sounddevice", speaker)
    with pytest.raises(KeyboardInterrupt), Player("int16"):
        raise KeyboardInterrupt
    assert speaker.calls == ["start", "abort", "close"]
