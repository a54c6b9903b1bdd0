"""Writes the recordings of the held-out sentences: `python -m examples.demo_voice.recordings --out DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

import soundfile

from examples.demo_voice.speech import RATE_HZ, Speaker
from examples.demo_voice.text import held_out

_SEED = 1


def main() -> None:
    """Writes one WAV file for every sentence."""
    parser = argparse.ArgumentParser(description="Record the sentences that the demo voice is measured with.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write into")
    record(parser.parse_args().out)


def record(folder: Path) -> list[Path]:
    """One 16-bit WAV file for every held-out sentence, in order; those that are there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    speaker: Speaker | None = None
    paths = []
    for index, sentence in enumerate(held_out()):
        path = folder / f"{index:02d}.wav"
        if not path.exists():
            speaker = speaker or Speaker(_SEED)
            soundfile.write(path, speaker.say(sentence, vary=False), RATE_HZ, subtype="PCM_16")
        paths.append(path)
    return paths


if __name__ == "__main__":
    main()
