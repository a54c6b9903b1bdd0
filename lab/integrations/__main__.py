"""Runs the integrations with a real server, and recognises the words of their speech.

    python -m lab.integrations

Most integrations speak a text with the gateway and the demo voice. The stages of other servers
decode the codes of a recording with the demo codec. Every integration gets a virtual environment of
its own below `out/integrations`, because each library has many dependencies. A word error rate
above one half is an error.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from examples.commands import serving
from examples.demo_codec.codes import MODEL
from examples.demo_codec.encode import CodecEncoder
from examples.demo_voice.recordings import SENTENCE
from examples.demo_voice.text import held_out
from lab.quality.recogniser import Recogniser, word_error_rate
from token2wav_server import Ports
from token2wav_server.demo.speaker import RATE_HZ
from token2wav_voice import Recording

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
OUT = ROOT / "out" / "integrations"


@dataclass(frozen=True)
class Integration:
    """Program with a library of another project.

    Attributes:
        script: name of a file beside this program.
        riva: whether the program gets the address of Riva's interface, not of OpenAI's.
        stage: package of another server whose stage the program runs. It is installed without its
            dependencies. The program gets the address of a server with the demo codec, and a file
            of codes in place of a text.
        python: least version of Python that the packages need.
    """

    script: str
    packages: Sequence[str]
    riva: bool = False
    stage: str | None = None
    python: tuple[int, int] = (3, 10)


_TORCH = torch.__version__.partition("+")[0]
# What a stage of another server needs beside the client of this project.
_STAGE_PACKAGES = [f"{ROOT}[client]", f"torch=={_TORCH}", "msgspec>=0.18"]
_NARI_BENCH = (
    "tts-bench @ git+https://github.com/nari-labs/benchmarks"
    "@a2d65e16fa121d9dbd80dfbb0cf1007563f96509#subdirectory=tts_bench"
)
INTEGRATIONS = {
    "openai": Integration("openai_speech.py", ["openai>=2,<4"]),
    "realtime": Integration("realtime_speech.py", ["openai[realtime]>=3,<4"]),
    "pipecat": Integration("pipecat_speech.py", ["pipecat-ai[openai]>=1.14,<2"]),
    "pipecat-riva": Integration("pipecat_speech.py", ["pipecat-ai[nvidia]>=1.14,<2"], riva=True),
    "livekit": Integration(
        "livekit_speech.py", ["livekit-agents>=1.8,<2", "livekit-plugins-openai>=1.8,<2"]
    ),
    "riva": Integration("riva_speech.py", ["nvidia-riva-client>=2.28,<3"], riva=True),
    "nari-bench": Integration("nari_bench.py", [_NARI_BENCH], python=(3, 12)),
    "wyoming": Integration("wyoming_speech.py", ["wyoming-openai>=0.8,<1"], python=(3, 12)),
    "sglang-omni": Integration(
        "sglang_stage.py",
        [*_STAGE_PACKAGES, "msgpack>=1", "pydantic>=2,<3", "pyzmq>=25"],
        stage="sglang-omni>=0.1.9,<0.2",
        python=(3, 11),
    ),
    "vllm-omni": Integration("vllm_stage.py", _STAGE_PACKAGES, stage="vllm-omni>=0.30,<0.31"),
}
# The voice that says the sentences varies from call to call. The error rate of the first sentence
# alone varies from 0.2 to 0.5, that of all three from 0.2 to 0.4.
TEXT = (
    "The first boats were coming home, and the old man went down to the river to look at them. "
    "His daughter sat in front of the house, and she read a long letter from her brother in the "
    "city. It was a warm evening, and nobody wanted to go to bed."
)
_MOST_ERRORS = 0.5  # of the words; it is near 1 for other speech, and 0.1 for recordings
_START_S, _SPEECH_S, _POLL_S = 300, 120, 0.5


def main() -> None:
    """Runs the integrations; exits with status 1 if one fails."""
    parser = argparse.ArgumentParser(description="Run clients of other projects with the gateway.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: {', '.join(INTEGRATIONS)}"
    )
    names = parser.parse_args().names or list(INTEGRATIONS)
    if unknown := set(names) - set(INTEGRATIONS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(INTEGRATIONS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("integrations: terminated"))
    pythons: dict[str, Path] = {}
    for name in names:
        if (program := interpreter(INTEGRATIONS[name].python)) is None:
            least = ".".join(map(str, INTEGRATIONS[name].python))
            print(f"integrations: {name}: left out, because it needs Python {least}", flush=True)
        else:
            pythons[name] = environment(name, program)
    # The programs that speak a text need other servers than the stages, which decode codes.
    stages = {name: path for name, path in pythons.items() if INTEGRATIONS[name].stage}
    clients = {name: path for name, path in pythons.items() if name not in stages}
    recogniser, failed = Recogniser(), []
    if clients:
        with servers() as (base_url, riva_address):
            for name, python in clients.items():
                address = riva_address if INTEGRATIONS[name].riva else base_url
                failed += run(name, python, address, TEXT, TEXT, recogniser)
    if stages:
        codes = OUT / "codes.npy"
        np.save(codes, CodecEncoder(MODEL)(Recording.load(SENTENCE).at(RATE_HZ)))
        with serving(MODEL) as address:
            for name, python in stages.items():
                failed += run(name, python, address, codes, held_out()[0], recogniser)
    if failed:
        sys.exit(f"integrations: failed: {', '.join(failed)}")


def run(
    name: str, python: Path, address: str, said: str | Path, text: str, recogniser: Recogniser
) -> list[str]:
    """Runs the program of an integration, and recognises the words of its speech.

    Args:
        said: text, or file of codes, that the program gets.
        text: words that the speech should have.

    Returns:
        The name of the integration if it failed.
    """
    wav = OUT / f"{name}.wav"
    wav.unlink(missing_ok=True)
    # Isolated from PYTHONPATH, so that only the packages of its environment are found.
    command = [python, "-I", FOLDER / INTEGRATIONS[name].script, address, said, wav]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=_SPEECH_S, check=False
    )
    if done.returncode:
        print(f"integrations: {name}: failed\n{done.stderr}", flush=True)
        return [name]
    if done.stdout:
        print(f"integrations: {name}: {done.stdout.strip()}", flush=True)
    heard = recogniser(Recording.load(wav).at(RATE_HZ))
    rate = word_error_rate([text], [heard])
    print(f"integrations: {name}: word error rate {rate:.2f}: {heard}", flush=True)
    return [name] if rate > _MOST_ERRORS else []


def interpreter(least: tuple[int, int]) -> str | None:
    """Returns an interpreter of this machine with a version; None if there is none."""
    if sys.version_info >= least:
        return sys.executable
    versions = (f"python3.{minor}" for minor in range(least[1], least[1] + 4))
    for path in filter(None, map(shutil.which, versions)):
        # The shims of pyenv exist for versions that cannot be started.
        if not subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode:
            return path
    return None


def environment(name: str, program: str) -> Path:
    """Creates the virtual environment of an integration, and returns its interpreter."""
    folder = OUT / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([program, "-m", "venv", folder], check=True)
    packages = INTEGRATIONS[name].packages
    print(f"integrations: {name}: installing {' '.join(packages)}", flush=True)
    command = [python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*map(str, command), *packages], check=True)
    if stage := INTEGRATIONS[name].stage:
        subprocess.run([*map(str, command), "--no-deps", stage], check=True)
    return python


@contextmanager
def servers() -> Iterator[tuple[str, str]]:
    """Runs the servers of `make speech`.

    Yields the base URL of the gateway, and host:port of its interface for Riva's clients.
    """
    ports = Ports.free()
    program = Path(sys.executable).with_name("token2wav")
    command = [str(program), "up", "--voices", "out/voices", "--port", str(ports.http)]
    command += ["--riva-port", str(ports.metrics)]
    url = f"http://127.0.0.1:{ports.http}"
    with (OUT / "servers.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + _START_S
            while not answers(f"{url}/health/ready"):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"integrations: the servers did not start; see {log.name}")
                time.sleep(_POLL_S)
            yield f"{url}/v1", f"127.0.0.1:{ports.metrics}"
        finally:
            process.terminate()
            process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_POLL_S):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
