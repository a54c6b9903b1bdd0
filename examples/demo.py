"""Demo for any machine: turns a recording into tokens, and the tokens into speech on a real Triton
server.

The demo model was not trained on the sentence. The tokens are sent at the pace of a language model,
and the audio comes back while tokens are still being sent. A picture shows the recording above the
synthesized audio. `--family codec` speaks with the demo codec, which needs no voice.

The demo voice writes files named `demo*`, and the demo codec files named `demo_codec*`. The files
replace the files of an earlier run only when all new files are complete.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np
import soundfile

from examples.commands import ROOT, environment, environment_command, serving, shown
from examples.demo_voice.recordings import PROMPT, SENTENCE
from token2wav_server import ServerError
from token2wav_voice.features import PROMPT_RATE_HZ, prompt_mel
from token2wav_voice.recording import Recording

mpl.use("Agg")
from matplotlib import pyplot as plt

MODEL, CODEC = (ROOT / "examples" / f"demo_{kind}" / "model" for kind in ("voice", "codec"))
OUT = ROOT / "out"
NAMES = {"voice": "demo", "codec": "demo_codec"}  # how the names of the written files begin
TOKENS_PER_SECOND = 25
SAMPLES_PER_TOKEN = 960
FRAMES_PER_SECOND = 50


def main() -> None:
    """Runs the demo; exits with status 1 and a message if a check fails."""
    parser = argparse.ArgumentParser(
        description="Synthesize the speech tokens of a recording with a real Triton server."
    )
    parser.add_argument(
        "wav",
        nargs="?",
        type=Path,
        default=SENTENCE,
        help="recording (default: a bundled sentence)",
    )
    parser.add_argument(
        "--family",
        choices=("voice", "codec"),
        default="voice",
        help="model that speaks: the demo voice (default) or the demo codec",
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FOLDER", help="folder of the files (default: out)"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="demo-", dir=out) as folder:
            _speak(options.wav.resolve(), options.family, Path(folder))
            for path in Path(folder).iterdir():
                path.replace(out / path.name)
    except ServerError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
    wav, picture = (
        os.path.relpath(out / f"{NAMES[options.family]}{suffix}") for suffix in (".wav", ".png")
    )
    print(f"demo: {wav} is the audio; {picture} shows the recording above it")


def _speak(wav: Path, family: str, folder: Path) -> None:
    """Writes the tokens of a recording, their audio, and the picture of both into a folder."""
    model, make_tokens = (CODEC, _encode) if family == "codec" else (MODEL, _tokenize)
    tokens, audio, picture = (
        folder / f"{NAMES[family]}{suffix}" for suffix in ("_tokens.npy", ".wav", ".png")
    )
    speaker = make_tokens(wav, tokens)
    with serving(model) as url:
        synth = ("--tokens", tokens, *speaker, "--out", audio, "--rate", TOKENS_PER_SECOND)
        _run(folder, "token2wav", "synth", "--url", url, *synth)
    _check(tokens, audio)
    draw(wav, audio, picture)


def _tokenize(wav: Path, tokens: Path) -> tuple[object, ...]:
    """Writes tokens of a recording and a voice; returns the client's arguments of the voice."""
    voice = tokens.with_name("demo_voice.safetensors")
    model = ("--model", MODEL)
    _run(tokens.parent, "token2wav", "tokenize", *model, "--wav", wav, "--out", tokens)
    _run(tokens.parent, "token2wav", "voice", "create", *model, "--wav", PROMPT, "--out", voice)
    return "--voice", voice


def _encode(wav: Path, tokens: Path) -> tuple[object, ...]:
    """Writes the codes of a recording. A codec has no voice."""
    encode = ("python", "-m", "examples.demo_codec.encode", "--wav", wav)
    _run(tokens.parent, *encode, "--out", tokens)
    return ()


def draw(original: Path, result: Path, picture: Path) -> None:
    """Draws the log-mels of two recordings, one above the other, with the same time axis."""
    figure, panels = plt.subplots(
        2, 1, figsize=(10, 5), sharex=True, sharey=True, layout="constrained"
    )
    for panel, path, title in zip(
        panels, (original, result), ("recording", "through tokens"), strict=True
    ):
        mel = prompt_mel(Recording.load(path).at(PROMPT_RATE_HZ))
        extent = (0.0, len(mel) / FRAMES_PER_SECOND, 0.0, float(mel.shape[1]))
        panel.imshow(mel.T, origin="lower", aspect="auto", extent=extent, vmin=-11, vmax=2)
        panel.set(title=title, ylabel="mel band")
    panels[-1].set_xlabel("seconds")
    figure.savefig(picture, dpi=90)
    plt.close(figure)


def _run(folder: Path, *words: object) -> None:
    """Runs a command in the folder of its files, so that it prints their short names.

    The command is shown with the names that the files have at the end.
    """
    files = {word for word in words if isinstance(word, Path) and word.parent == folder}
    print(shown([folder.parent / word.name if word in files else word for word in words]))
    names = [word.name if word in files else word for word in words]
    command = environment_command(names)
    done = subprocess.run(command, cwd=folder, env=environment(), check=False)
    if done.returncode != 0:
        sys.exit(f"demo: {words[0]} failed with status {done.returncode}")


def _check(tokens: Path, audio: Path) -> None:
    count, samples = len(np.load(tokens)), soundfile.info(audio).frames
    if samples != count * SAMPLES_PER_TOKEN:
        sys.exit(
            f"demo: {audio.name} has {samples} samples, but {count} tokens make "
            f"{count * SAMPLES_PER_TOKEN}"
        )
    print(
        f"demo: {audio.name} has {samples} samples, {SAMPLES_PER_TOKEN} for each of {count} tokens"
    )


if __name__ == "__main__":
    main()
