"""Recordings of the held-out sentences, which training never uses.

    python -m lab.demo_voice.recordings --out DIR

Without --out, the two recordings of the demo are made again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import soundfile

from examples.demo_voice.recordings import FOLDER, PROMPT, SENTENCE
from examples.demo_voice.text import HELD_OUT, held_out
from token2wav_server.demo import PROMPT_TEXT
from token2wav_server.demo.speaker import RATE_HZ, Speaker

_SEED = 1


def main() -> None:
    """Writes a WAV file for every held-out sentence, or the two recordings of the demo."""
    parser = argparse.ArgumentParser(
        description="Record the sentences that the demo voice is measured with."
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write into (default: the demo's two files)",
    )
    out: Path | None = parser.parse_args().out
    if out is not None:
        record(out)
        return
    FOLDER.mkdir(exist_ok=True)
    speaker = Speaker(_SEED)
    _write(PROMPT, speaker, PROMPT_TEXT)
    _write(SENTENCE, speaker, held_out()[0])


def record(folder: Path, text: Path = HELD_OUT) -> list[Path]:
    """Writes one WAV file for every sentence of a text, unless all exist; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    sentences = held_out(text)
    paths = [folder / f"{text.stem}_{index:02d}.wav" for index in range(len(sentences))]
    if not all(path.exists() for path in paths):
        speaker = Speaker(_SEED)
        for path, sentence in zip(paths, sentences, strict=True):
            _write(path, speaker, sentence)
    return paths


def _write(path: Path, speaker: Speaker, sentence: str) -> None:
    soundfile.write(path, speaker.say(sentence, vary=False), RATE_HZ, subtype="PCM_16")


if __name__ == "__main__":
    main()
