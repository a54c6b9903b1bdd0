"""Flood test: a listener at the pace of speech is measured before and while others send long utterances at once.

Starts a real tritonserver, speaks a paced utterance alone and then beside the long ones, and prints the silences that a
player heard. Nothing is saved: the figures in docs/architecture.md are replayed by `tests/serving/test_policy.py`,
whose clock no other program can disturb.

    .venv/bin/python -m benchmarks.flood --model small
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path
from statistics import median

import numpy as np
import yaml

from benchmarks.models import SIZES, random_model
from benchmarks.serving_load import AT_ONCE, DEMO, PACE, paced
from token2wav_client import Client, ClientError, ClientVoice
from token2wav_client.audio import SAMPLE_RATE
from token2wav_server import Ports, TritonServer


def silences(url: str, seconds: float, buffer_s: float) -> list[float]:
    """Lists the gaps that a listener hears whose player starts `buffer_s` after the first audio."""
    tokens = np.resize(np.load(DEMO / "tokens.npy"), round(PACE * seconds))
    gaps, plays_until = [], None
    with Client(url) as client:
        for chunk in client.synthesize(paced(tokens, PACE, 5), ClientVoice.load(DEMO / "voice.safetensors")):
            if plays_until is None:
                plays_until = chunk.arrival_s + buffer_s
            gaps.append(max(0.0, chunk.arrival_s - plays_until))
            plays_until = max(plays_until, chunk.arrival_s) + len(chunk.audio) / SAMPLE_RATE
    return gaps


def speak_long(url: str, tokens: int, stop: threading.Event, heard: list[float]) -> None:
    """Sends one long utterance at once and reads until told to stop."""
    spoken = np.resize(np.load(DEMO / "tokens.npy"), tokens)
    seconds = 0.0
    try:
        with Client(url) as client:
            for chunk in client.synthesize(
                paced(spoken, AT_ONCE, tokens), ClientVoice.load(DEMO / "voice.safetensors")
            ):
                seconds += len(chunk.audio) / SAMPLE_RATE
                if stop.is_set():
                    break
    except ClientError as error:
        print(f"a long utterance failed: {error}")
    heard.append(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"folder, or random weights of a size: {', '.join(SIZES)}")
    parser.add_argument("--seconds", type=float, default=20.0, help="of audio that the paced listener hears")
    parser.add_argument("--long", type=int, default=8, help="utterances that are sent at once")
    parser.add_argument("--tokens", type=int, default=6000, help="of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--buffer-seconds", type=float, default=0.3, help="that a player waits after the first audio")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        known = options.model in SIZES
        folder = random_model(Path(temporary), SIZES[options.model]) if known else Path(options.model)
        config = Path(temporary) / "server.yaml"
        limits = {"player_buffer_seconds": options.buffer_seconds}
        config.write_text(yaml.safe_dump({"stream": {"hop": "lead"}, "limits": limits}))
        longest: dict[str, list[float]] = {"alone": [], "among long ones": []}
        log = Path(temporary) / "triton.log"
        with TritonServer(folder, config=config, ports=Ports.free(), log_file=log) as server:
            for _ in range(options.rounds):
                longest["alone"].append(max(silences(server.grpc_url, options.seconds, options.buffer_seconds)))
                stop, heard = threading.Event(), list[float]()
                arguments = (server.grpc_url, options.tokens, stop, heard)
                threads = [threading.Thread(target=speak_long, args=arguments) for _ in range(options.long)]
                timer = threading.Timer(3.0, lambda threads=threads: [thread.start() for thread in threads])
                timer.start()
                gaps = silences(server.grpc_url, options.seconds, options.buffer_seconds)
                stop.set()
                timer.join()
                for thread in threads:
                    thread.join()
                longest["among long ones"].append(max(gaps))
                print(f"among long ones: gaps {[round(gap, 2) for gap in gaps if gap]}, they heard {sum(heard):.0f} s")
        for where, found in longest.items():
            print(f"longest gap {where}: median {median(found):.2f} s of {[round(gap, 2) for gap in found]}")


if __name__ == "__main__":
    main()
