"""Batch job: synthesizes every token file of a folder, several files at a time.

After an interruption, the same command continues with the files that are missing.

    python examples/synthesize_folder.py tokens/ wavs/ --voice voice.safetensors
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tqdm import tqdm

from token2wav_client import AsyncClient, ClientError, ClientVoice, InputError, ServerError
from token2wav_client.token_source import open_tokens
from token2wav_client.writer import AudioWriter

SUFFIXES = {".npy", ".json", ".txt"}


async def synthesize(client: AsyncClient, tokens: Path, voice: ClientVoice, out: Path) -> float:
    """Synthesizes one file, and returns the seconds of audio.

    The WAV file gets its name when it is complete.
    """
    unfinished = out.with_suffix(".part.wav")
    writer = AudioWriter(unfinished, "int16")
    seconds = 0.0
    async for chunk in client.synthesize(
        open_tokens(str(tokens)).pieces, voice, audio_format="int16"
    ):
        writer.write(chunk.audio, chunk.sample_rate)
        seconds += chunk.duration_s
    unfinished.replace(out)
    return seconds


async def synthesize_all(options: argparse.Namespace) -> list[str]:
    """Synthesizes the files that have no WAV file yet.

    Returns:
        One error message for each file that failed.
    """
    voice = ClientVoice.load(options.voice)
    files = [file for file in sorted(options.tokens.iterdir()) if file.suffix in SUFFIXES]
    if len({file.stem for file in files}) < len(files):
        raise InputError(
            f"{options.tokens}: two files have the same name with different endings, so "
            "both would write the same WAV file"
        )
    todo = {file: out for file in files if not (out := options.out / f"{file.stem}.wav").exists()}
    options.out.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    slots = asyncio.Semaphore(options.streams)
    async with AsyncClient(options.url, retries=5) as client:
        with tqdm(total=len(files), initial=len(files) - len(todo), unit="file") as bar:

            async def one(file: Path, out: Path) -> None:
                async with slots:
                    try:
                        bar.set_postfix_str(
                            f"{file.stem}: {await synthesize(client, file, voice, out):.1f} s"
                        )
                        bar.update()
                    # an error of this file only; an error of the connection ends the whole job
                    except (InputError, ServerError) as error:
                        failures.append(f"{file.name}: {error}")

            await asyncio.gather(*(one(file, out) for file, out in todo.items()))
    return failures


def main() -> None:
    """Runs the example; exits with status 1 if a file could not be synthesized."""
    parser = argparse.ArgumentParser(
        description="Synthesize a folder of .npy, .json and .txt token files."
    )
    parser.add_argument("tokens", type=Path, help="folder with token files")
    parser.add_argument("out", type=Path, help="folder for the WAV files")
    parser.add_argument("--voice", required=True, help=".npz or .safetensors")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument(
        "--streams", type=int, default=8, help="number of concurrent files (default: %(default)s)"
    )
    options = parser.parse_args()
    try:
        failures = asyncio.run(synthesize_all(options))
    except (ClientError, OSError) as error:
        sys.exit(f"synthesize_folder: {error}")
    if failures:
        sys.exit("\n".join(f"synthesize_folder: {failure}" for failure in failures))


if __name__ == "__main__":
    main()
