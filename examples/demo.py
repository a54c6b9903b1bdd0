"""Demo for any machine: turns a recording into tokens, and the tokens into speech on a real Triton
server.

The demo model was not trained on the sentence. The tokens are sent at the pace of a language model,
and the audio comes back while tokens are still being sent. A picture shows the recording above the
synthesized audio. `--family codec` speaks with the demo codec, which needs no voice.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import soundfile

from token2wav_server import Ports, ServerError, TritonServer
from token2wav_voice.features import PROMPT_RATE_HZ, prompt_mel
from token2wav_voice.recording import Recording

mpl.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
VOICE_FOLDER = ROOT / "examples" / "demo_voice"
MODEL, CODEC = VOICE_FOLDER / "model", ROOT / "examples" / "demo_codec" / "model"
SENTENCE = VOICE_FOLDER / "recordings" / "sentence.wav"
PROMPT = VOICE_FOLDER / "recordings" / "prompt.wav"
OUT = ROOT / "out"
TOKENS, VOICE, WAV, PICTURE = (
    OUT / f"demo{suffix}" for suffix in ("_tokens.npy", "_voice.safetensors", ".wav", ".png")
)
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
    options = parser.parse_args()
    wav: Path = options.wav.resolve()
    model, make_tokens = (CODEC, _encode) if options.family == "codec" else (MODEL, _tokenize)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    OUT.mkdir(exist_ok=True)
    for path in (TOKENS, VOICE, WAV, PICTURE):
        path.unlink(missing_ok=True)
    try:
        speaker = make_tokens(wav)
        print(f"demo: starting a Triton server with the demo {options.family}", flush=True)
        with TritonServer(model, ports=Ports.free(), verbose=False) as server:
            print(
                f"demo: ready at {server.grpc_url}; sending {TOKENS_PER_SECOND} tokens per second",
                flush=True,
            )
            synth = ("--tokens", TOKENS, *speaker, "--out", WAV, "--rate", TOKENS_PER_SECOND)
            _run("token2wav-client", "synth", "--url", server.grpc_url, *synth)
    except ServerError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
    _check()
    draw(wav, WAV, PICTURE)
    print(
        f"demo: {PICTURE.relative_to(ROOT)} shows the recording above the audio that was "
        "synthesized from its tokens"
    )


def _tokenize(wav: Path) -> tuple[object, ...]:
    """Writes tokens of a recording and a voice; returns the client's arguments of the voice."""
    _run("token2wav-tokenize", "--model", MODEL, "--wav", wav, "--out", TOKENS)
    _run("token2wav-voice", "create", "--model", MODEL, "--wav", PROMPT, "--out", VOICE)
    return "--voice", VOICE


def _encode(wav: Path) -> tuple[object, ...]:
    """Writes the codes of a recording. A codec has no voice."""
    _run("python", "-m", "examples.demo_codec.encode", "--wav", wav, "--out", TOKENS)
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


def _run(program: str, *arguments: object) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *map(str, arguments)], cwd=ROOT, check=False
    )
    if done.returncode != 0:
        sys.exit(f"demo: {program} failed with status {done.returncode}")


def _check() -> None:
    tokens = len(np.load(TOKENS))
    samples = soundfile.info(WAV).frames
    if samples != tokens * SAMPLES_PER_TOKEN:
        sys.exit(
            f"demo: {WAV} has {samples} samples, but {tokens} tokens make "
            f"{tokens * SAMPLES_PER_TOKEN}"
        )
    print(
        f"demo: {WAV.relative_to(ROOT)} has {samples} samples, {SAMPLES_PER_TOKEN} for each of "
        f"{tokens} tokens"
    )


if __name__ == "__main__":
    main()
