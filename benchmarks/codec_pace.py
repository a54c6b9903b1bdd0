"""Listeners of codecs on a real server at the pace of speech: gaps, and equality with the library.

Starts a server for each codec, at a small size with random weights. The default is the larger size
of the golden data. Its frames may be far shorter than published frames. So clients send portions of
80 ms, the frame of most published codecs, and hops last up to a second. `--sizes sixteenth` has a
sixteenth of the published channels at the published rates. There clients send frame by frame, or
portions of 40 ms if frames are shorter (DAC).

All clients send their codes when a language model at the pace of speech would have emitted them.
The audio of every client is compared with the library's audio of the whole utterance. The clients
share the cores with the server. Prints a line for each codec; writes JSON.

    .venv/bin/python -m benchmarks.codec_pace
    .venv/bin/python -m benchmarks.codec_pace --sizes sixteenth --name codec_pace_sixteenth
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import describe, save
from benchmarks.open_loop import ROUNDING_S, Subject
from testkit.models.codec_models import WRITERS
from testkit.models.family_golden import FamilyGolden
from testkit.models.published_codecs import SIXTEENTH, write_codec
from token2wav import StreamConfig, Token2Wav
from token2wav.config.model_config import ModelConfig
from token2wav_client import AsyncClient
from token2wav_client.listening import Recording, buffered, record, summary
from token2wav_server import Ports, TritonServer

_UTTERANCES = 4  # different utterances; clients share them
_GOLDEN, _SIXTEENTH = "golden", "sixteenth"  # sizes of the models
_PORTION_S = {_GOLDEN: 0.08, _SIXTEENTH: 0.04}  # shortest audio of a portion of tokens
_PLAYER_MS = 200  # audio that a player holds before it starts

Audio = NDArray[np.float32]


def sizes_of(sizes: str) -> dict[str, dict[str, Any]]:
    """Returns the sizes of each codec, by the name of its golden data."""
    return (
        SIXTEENTH
        if sizes == _SIXTEENTH
        else {name: FamilyGolden(name, "small").sizes for name in WRITERS}
    )


def settings_of(config: ModelConfig, sizes: str) -> StreamConfig:
    """Returns the settings of streams. Early audio is off, because it depends on arrival times."""
    if sizes == _SIXTEENTH:
        return StreamConfig(lookahead_frames=0)
    second = math.ceil(config.token_frame_rate / config.block_tokens) * config.block_tokens
    return StreamConfig(lookahead_frames=0, max_hop_tokens=second)


async def portions(subject: Subject, portion_s: float) -> AsyncIterator[NDArray[np.int32]]:
    """Yields the tokens of an utterance, each portion when its last token is due."""
    size = max(1, math.ceil(portion_s * subject.tokens_per_second))
    began = time.monotonic()
    for start in range(0, len(subject.tokens), size):
        portion = subject.tokens[start : start + size]
        due = began + (start + len(portion)) / subject.tokens_per_second
        await asyncio.sleep(due - time.monotonic())
        yield portion


async def listen(
    client: AsyncClient, subject: Subject, portion_s: float, delay_s: float
) -> tuple[Recording, Audio]:
    """Sends an utterance at the pace of speech, after a delay, and collects its audio."""
    await asyncio.sleep(delay_s)
    chunks, rate, began = list[tuple[float, Audio]](), 1, time.monotonic()
    async for chunk in client.synthesize(portions(subject, portion_s)):
        chunks.append((time.monotonic() - began, np.asarray(chunk.audio, np.float32)))
        rate = chunk.sample_rate
    recording = record(chunks, rate, time.monotonic() - began)
    return recording, np.concatenate([audio for _, audio in chunks])


async def listen_together(
    url: str, subjects: list[Subject], streams: int, portion_s: float
) -> list[tuple[Recording, Audio]]:
    """Runs several clients. Their portions are spread over the time of a portion."""
    spread_s = max(portion_s, 1 / subjects[0].tokens_per_second)
    async with AsyncClient(url) as client:
        return await asyncio.gather(
            *(
                listen(
                    client,
                    subjects[index % len(subjects)],
                    portion_s,
                    spread_s * index / streams,
                )
                for index in range(streams)
            )
        )


def measure(name: str, sizes: str, streams: int, seconds: float) -> dict[str, Any]:
    """Measures one codec."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, settings = Path(temporary) / name, Path(temporary) / "server.yaml"
        folder.mkdir()
        write_codec(name, folder, sizes_of(sizes)[name])
        first = Subject.of(folder, seconds, speed=1.0)
        stream = settings_of(first.config, sizes)
        settings.write_text(
            f"stream: {{lookahead_frames: 0, max_hop_tokens: {stream.max_hop_tokens}}}"
        )
        subjects = [
            Subject(first.config, np.roll(first.tokens, -shift, axis=0), None, 1.0)
            for shift in range(_UTTERANCES)
        ]
        model = Token2Wav.load(folder, stream=stream)
        wholes = [model.synthesize(subject.tokens) for subject in subjects]
        with TritonServer(
            folder, config=settings, ports=Ports.free(), log_file=Path(temporary) / "triton.log"
        ) as server:
            heard = asyncio.run(
                listen_together(server.grpc_url, subjects, streams, _PORTION_S[sizes])
            )
    errors = [
        float(np.abs(audio - wholes[index % _UTTERANCES]).max() / wholes[index % _UTTERANCES].std())
        for index, (_, audio) in enumerate(heard)
    ]
    recordings = [recording for recording, _ in heard]
    return {
        "model": name,
        "sizes": sizes,
        "streams": streams,
        "frames_per_s": round(first.config.token_frame_rate, 2),
        "seconds": seconds,
        "complete": sum(
            abs(recording.audio_s - subject.audio_s) <= ROUNDING_S
            for recording, subject in zip(recordings, subjects * streams, strict=False)
        ),
        "largest_error": float(f"{max(errors):.2g}"),
        "first_playable_ms": _milliseconds(recording.first_playable_s for recording in recordings),
        "buffer_ms": _milliseconds(recording.buffer_s for recording in recordings),
        "without_gap": round(streams * (buffered(recordings, _PLAYER_MS) or 0)),
    }


def _milliseconds(values: Iterable[float | None]) -> dict[str, float] | None:
    return summary(None if value is None else 1000 * value for value in values)


def as_line(row: dict[str, Any]) -> str:
    first, buffer = row["first_playable_ms"], row["buffer_ms"]
    return (
        f"{row['model']:14} {row['streams']} streams of {row['frames_per_s']} frames/s: "
        f"{row['complete']} complete, largest error {row['largest_error']:.0e} of the deviation, "
        f"first audio {first['p50']:.0f} / {first['p99']:.0f} ms, buffer {buffer['p50']:.0f} / "
        f"{buffer['max']:.0f} ms, {row['without_gap']} without a gap"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", choices=_PORTION_S, default=_GOLDEN)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="default: all codecs")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of an utterance")
    parser.add_argument("--name", default="codec_pace", help="name of the result")
    options = parser.parse_args()
    if unknown := set(options.models or ()) - set(sizes_of(options.sizes)):
        parser.error(f"--models: {', '.join(sorted(unknown))} is no codec of these sizes")
    rows = []
    for name in options.models or sizes_of(options.sizes):
        rows.append(measure(name, options.sizes, options.streams, options.seconds))
        print(as_line(rows[-1]), flush=True)
    save(options.name, {**describe(), "player_ms": _PLAYER_MS, "rows": rows})


if __name__ == "__main__":
    main()
