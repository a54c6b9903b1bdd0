"""The whole way once, on any machine: a real Triton server with a tiny model speaks some tokens into a WAV file.

The tokens arrive at the pace of a language model, and the audio comes back while they still do. The tiny model
has random weights: it makes noise, not speech, by the same code and over the same wire as a real one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile

from token2wav_server import Ports, ServerError, TritonServer

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "tests" / "data" / "tiny"
TOKENS = ROOT / "tests" / "data" / "demo" / "tokens.npy"
VOICE = ROOT / "tests" / "data" / "demo" / "voice.safetensors"
OUT = ROOT / "out" / "demo.wav"
TOKENS_PER_SECOND = 25
SAMPLES_PER_TOKEN = 960


def main() -> None:
    """Runs the demo; ends with status 1 and a sentence if anything is not as it should be."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    OUT.parent.mkdir(exist_ok=True)
    OUT.unlink(missing_ok=True)
    print("demo: starting a Triton server with the tiny model", flush=True)
    try:
        with TritonServer(MODEL, ports=Ports.free(), verbose=False) as server:
            print(f"demo: ready at {server.grpc_url}; sending {TOKENS_PER_SECOND} tokens per second", flush=True)
            _synthesize(server.grpc_url)
    except ServerError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
    _check()


def _synthesize(url: str) -> None:
    client = Path(sys.executable).parent / "token2wav-client"
    arguments = ["--url", url, "--tokens", TOKENS, "--voice", VOICE, "--out", OUT, "--rate", TOKENS_PER_SECOND]
    done = subprocess.run([client, "synth", *map(str, arguments)], check=False)
    if done.returncode != 0:
        sys.exit(f"demo: the client failed with status {done.returncode}")


def _check() -> None:
    tokens = len(np.load(TOKENS))
    samples = soundfile.info(OUT).frames
    if samples != tokens * SAMPLES_PER_TOKEN:
        sys.exit(f"demo: {OUT} has {samples} samples, but {tokens} tokens make {tokens * SAMPLES_PER_TOKEN}")
    print(f"demo: {OUT.relative_to(ROOT)} has {samples} samples, {SAMPLES_PER_TOKEN} for each of {tokens} tokens")


if __name__ == "__main__":
    main()
