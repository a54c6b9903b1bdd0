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


def test_a_full_device_behind_standard_output_is_named() -> None:
    code = (
        "import sys, numpy\n"
        "from token2wav_client.writer import FILE_FORMATS, AudioWriter, OutputError\n"
        "for file_format in FILE_FORMATS:\n"
        "    try:\n"
        "        with AudioWriter('-', file_format=file_format) as writer:\n"
        "            writer.write(numpy.zeros(9, 'f4'))\n"
        "    except OutputError as error:\n"
        "        print(error, file=sys.stderr)\n"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    message = "out: cannot write to standard output (No space left on device)"
    assert done.stderr.splitlines() == [message] * len(FILE_FORMATS)


UNUSABLE = {
    "terminal": (["--out", "-"], "out: standard output is a terminal; pipe the samples"),
    "sounddevice": (["--play"], "play: the library sounddevice is missing; run: pip install"),
    "portaudio": (["--play"], "play: sounddevice does not find PortAudio; run: apt-get install"),
    "device": (["--play"], "play: no audio device can play 24000 Hz (none)"),
}


@pytest.mark.parametrize("wrong", UNUSABLE)
def test_unusable_arguments_are_refused_before_a_connection(
    wrong: str,
    tmp_path: Path,
    voice_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments, message = UNUSABLE[wrong]
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
    command = ["synth", "--tokens=/dev/null", f"--voice={voice_file}", "--url=127.0.0.1:1"]
    assert main([*command, *arguments]) == 2
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


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> Loudspeaker:
    speaker = Loudspeaker(broken=False)
    monkeypatch.setitem(sys.modules, "sounddevice", speaker)
    return speaker


def test_playing(speaker: Loudspeaker) -> None:
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


@pytest.mark.parametrize(
    ("shape", "rate", "rates", "channels"),
    [((6,), 16_000, [24_000, 16_000], [1, 1]), ((3, 2), 24_000, [24_000, 24_000], [1, 2])],
)
def test_a_device_is_opened_again_for_another_rate_or_channels(
    shape: tuple[int, ...], rate: int, rates: list[int], channels: list[int], speaker: Loudspeaker
) -> None:
    audio = np.arange(6, dtype=np.int16).reshape(shape)
    with Player("int16") as player:
        for _ in range(2):
            player.write(audio, rate)
    assert (speaker.rates, speaker.channels) == (rates, channels)
    assert speaker.calls == ["start", "stop", "close"] * 2
    assert all(np.array_equal(heard.ravel(), audio.ravel()) for heard in speaker.heard)


def test_playing_stops_at_once_when_something_fails(speaker: Loudspeaker) -> None:
    with pytest.raises(KeyboardInterrupt), Player("int16"):
        raise KeyboardInterrupt
    assert speaker.calls == ["start", "abort", "close"]
