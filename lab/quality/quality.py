"""Quality of the demo voice: intelligibility, closeness to recordings, and audible chunk borders.

Records sentences that were not in the training data, turns them into tokens, and synthesizes them
in every way that the library offers: at once, as streams, with bounded history, with fewer ODE
steps, with cheaper precision, and once through a real server and the client. Prints a table; writes
JSON.

    .venv/bin/python -m lab.quality.quality
    .venv/bin/python -m lab.quality.quality --text examples/demo_voice/unseen.txt \\
        --name quality_unseen
    .venv/bin/python -m lab.quality.quality --only first-audio --name quality_first_audio
    .venv/bin/python -m lab.quality.quality --only storage --name quality_storage
    .venv/bin/python -m lab.quality.quality --only tf32 --name quality_tf32
    .venv/bin/python -m lab.quality.quality --codec --name quality_codec

The recordings need `pip install -e '.[demo]'`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from benchmarks.environment import ROOT, describe, save
from examples.demo_codec.codes import MODEL as CODEC
from examples.demo_codec.encode import CodecEncoder
from examples.demo_voice.recordings import PROMPT
from examples.demo_voice.text import HELD_OUT, held_out
from lab.demo_voice.folder import MODEL
from lab.demo_voice.recordings import record
from lab.quality.quality_scores import (
    Borders,
    intelligibility,
    mel_cepstral_distortion,
    perceptual,
    resampled,
)
from lab.quality.recogniser import Recogniser, Signal, word_error_rate
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.layers import convolutions
from token2wav.published.registry import read_config
from token2wav_client import Client, ClientVoice
from token2wav_server import Ports, TritonServer
from token2wav_voice import FrontEnd, PromptVoice, Recording
from token2wav_voice.features import prompt_mel

RECORDINGS = ROOT / "out" / "quality"
WINDOWS = (1, 2, 4, 8)
STEPS = (10, 5, 3, 2)  # the model's own number is left out
# Provisional audio: tokens per second, ODE steps of the stream, `first_tokens`,
# `provisional_lookahead_tokens` and `provisional_steps`. The model has 2 steps. At a higher pace
# less of the audio is provisional.
FIRST_AUDIO = (
    (25, 10, 0, 1, 10),
    *((25, 2, count, lookahead, 2) for count in (5, 6) for lookahead in (1, 2, 3)),
    (25, 2, 8, 1, 2),
    (25, 2, 8, 2, 2),
    (50, 2, 6, 2, 2),
    (100, 2, 6, 2, 2),
    (25, 10, 5, 2, 3),
    (25, 10, 6, 2, 3),
    (25, 10, 6, 2, 2),
    (25, 10, 8, 1, 3),
)
WHOLE_BLOCKS = "whole blocks"
ORIGINAL, VOCODED, WHOLE = "recording", "mel of the recording", "whole sequence"
STREAMING = "streaming"

Speak = Callable[["Sentence"], list[Signal]]  # returns the audio of every chunk


@dataclass(frozen=True, eq=False)
class Sentence:
    """Sentence with its recording, and the tokens or codes of the recording."""

    text: str
    recording: Signal
    tokens: np.ndarray[Any, np.dtype[np.int32]]


def main() -> None:
    """Measures all rows, prints a table and writes the results."""
    parser = argparse.ArgumentParser(description="Measure how well the demo voice speaks.")
    parser.add_argument("--model", type=Path, help="model folder (default: the demo's)")
    parser.add_argument(
        "--codec", action="store_true", help="measure the demo codec instead of the demo voice"
    )
    parser.add_argument(
        "--text",
        type=Path,
        default=HELD_OUT,
        help="text file with one sentence per line (default: the held-out sentences)",
    )
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, help="folder for recordings")
    parser.add_argument("--sentences", type=int, help="number of sentences (default: all)")
    parser.add_argument(
        "--only",
        choices=SELECTIONS,
        help="measure only streams with provisional chunks (first-audio), with each type of the "
        "cache (storage), or the rounding of the vocoder on a GPU (tf32)",
    )
    parser.add_argument("--name", default="quality", help="name of the result files")
    options = parser.parse_args()

    folder: Path = options.model or (CODEC if options.codec else MODEL)
    listen: Callable[[Recording], Any]
    if options.codec:
        encoder = CodecEncoder(folder)
        listen, rows_of = lambda recording: encoder(recording.samples), partial(codec_ways, folder)
    else:
        front_end = FrontEnd(folder)
        prompt = front_end.voice(Recording.load(PROMPT))
        listen = front_end.tokens
        rows_of = partial(SELECTIONS.get(options.only, ways), folder, prompt)
    paths = record(options.recordings, options.text)[: options.sentences]
    texts = held_out(options.text)[: len(paths)]
    recordings = [Recording.load(path) for path in paths]
    sentences = [
        Sentence(text, recording.samples, listen(recording))
        for text, recording in zip(texts, recordings, strict=True)
    ]
    recogniser = Recogniser()
    subject = {
        "model": provenance(folder),
        "text": options.text.name,
        "sentences": len(sentences),
    }
    rows: dict[str, dict[str, Any]] = {}
    print("mode | WER | STOI | PESQ | MCD dB | jump dB")
    for name, speak in rows_of():
        rows[name] = _measure(name, sentences, speak, recogniser)
        for other in (ORIGINAL, WHOLE, WHOLE_BLOCKS, STREAMING):
            if other in rows and other != name and len(texts) > 1:
                rows[name][f"against {other}"] = resampled(
                    texts, rows[name]["heard"], rows[other]["heard"]
                )
        # The comparisons are kept, and not the transcripts that they were computed from.
        scores = {
            key: {field: value for field, value in row.items() if field != "heard"}
            for key, row in rows.items()
        }
        save(
            options.name,
            {"environment": describe("jiwer", "pocketsphinx", "pystoi"), **subject, "rows": scores},
        )
        print(_line(name, rows[name]), flush=True)


def ways(folder: Path, prompt: PromptVoice) -> Iterator[tuple[str, Speak]]:
    """Yields every row of the table with the function that synthesizes it.

    A model is loaded only when its row is requested.
    """
    voice = _voice(prompt)
    own_steps, most = read_config(folder).ode_steps, max(STEPS)
    yield ORIGINAL, lambda sentence: [sentence.recording]
    yield VOCODED, partial(_vocoded, _load(folder))
    yield WHOLE, partial(_whole, _load(folder), voice)
    if own_steps != most:
        yield (
            f"{WHOLE}, {most} steps",
            partial(_whole, _load(folder, StreamConfig(steps=(most,))), voice),
        )
    yield STREAMING, partial(_streamed, _load(folder), voice)
    for blocks in WINDOWS:
        windowed = StreamConfig(max_hop_tokens=25, left_blocks=blocks)
        yield f"left_blocks {blocks}", partial(_streamed, _load(folder, windowed), voice)
    for steps in STEPS:
        if steps != own_steps:
            yield (
                f"{steps} steps",
                partial(_streamed, _load(folder, StreamConfig(steps=(steps,))), voice),
            )
    yield "float16", partial(_streamed, _load(folder, precision="float16"), voice)
    yield from stored(folder, voice)
    with (
        TritonServer(folder, ports=Ports.free(), verbose=False) as server,
        Client(server.grpc_url) as client,
    ):
        served = ClientVoice(prompt.prompt_tokens, prompt.prompt_mel, prompt.speaker_embedding)
        yield "through the server", partial(_served, client, served)


def stored(folder: Path, voice: Voice) -> Iterator[tuple[str, Speak]]:
    """Yields streams with each small type of cached keys and values."""
    for storage in ("int8", "float8"):
        yield f"{storage} cache", partial(_streamed, _load(folder, cache_storage=storage), voice)


def storages(folder: Path, prompt: PromptVoice) -> Iterator[tuple[str, Speak]]:
    """Yields streams whose cached keys and values differ in their type alone."""
    voice = _voice(prompt)
    yield ORIGINAL, lambda sentence: [sentence.recording]
    yield STREAMING, partial(_streamed, _load(folder), voice)
    yield from stored(folder, voice)


def first_audio(folder: Path, prompt: PromptVoice) -> Iterator[tuple[str, Speak]]:
    """Yields streams that send audio before a block is complete.

    At the pace of speech, 25 tokens a second, such streams send provisional chunks all the time.
    """
    voice = _voice(prompt)
    yield ORIGINAL, lambda sentence: [sentence.recording]
    whole = _load(folder, StreamConfig(first_tokens=0))
    yield WHOLE_BLOCKS, partial(_paced, whole, voice, min(pace for pace, *_ in FIRST_AUDIO))
    for pace, steps, count, lookahead, provisional_steps in FIRST_AUDIO:
        stream = StreamConfig(
            first_tokens=count,
            provisional_lookahead_tokens=lookahead,
            provisional_steps=provisional_steps,
            steps=(steps,),
        )
        name = (
            f"{pace} tokens/s, {steps} steps, first_tokens {count}, "
            f"provisional_lookahead_tokens {lookahead}, provisional_steps {provisional_steps}"
        )
        yield name, partial(_paced, _load(folder, stream), voice, pace)


def rounded(folder: Path, prompt: PromptVoice) -> Iterator[tuple[str, Speak]]:
    """Yields whole sequences with the vocoder in float32, and with the rounding of a GPU."""
    voice = _voice(prompt)
    model = _load(folder)
    yield WHOLE, partial(_whole, model, voice)
    yield f"{WHOLE}, vocoder in TF32", partial(_whole_in_tf32, model, voice)


def codec_ways(folder: Path) -> Iterator[tuple[str, Speak]]:
    """Yields the rows of a codec, which needs no voice."""
    yield ORIGINAL, lambda sentence: [sentence.recording]
    model = _load(folder)
    yield WHOLE, lambda sentence: [model.synthesize(sentence.tokens)]
    yield STREAMING, partial(_streamed, model, None)


SELECTIONS = {"first-audio": first_audio, "storage": storages, "tf32": rounded}


def _voice(prompt: PromptVoice) -> Voice:
    return Voice(prompt.prompt_tokens, prompt.prompt_mel, prompt.speaker_embedding)


def _load(folder: Path, stream: StreamConfig | None = None, **runtime: Any) -> Token2Wav:
    return Token2Wav.load(
        folder, stream=stream, runtime=RuntimeConfig(device="cpu", backend="torch", **runtime)
    )


def _vocoded(model: Token2Wav, sentence: Sentence) -> list[Signal]:
    return [model.vocode(prompt_mel(sentence.recording).T)]


def _whole(model: Token2Wav, voice: Voice, sentence: Sentence) -> list[Signal]:
    return [model.vocode(model.mel(sentence.tokens, voice, streaming=False))]


def _whole_in_tf32(model: Token2Wav, voice: Voice, sentence: Sentence) -> list[Signal]:
    mel = model.mel(sentence.tokens, voice, streaming=False)
    # Short convolutions would be products with packed weights, which the mode does not see.
    with patch.object(convolutions, "_multiplies", lambda *_: False), _RoundedProducts():
        return [model.vocode(mel)]


class _RoundedProducts(TorchFunctionMode):
    """Rounding of the inputs of all convolutions in float32 to the 10 bits of mantissa of TF32.

    A GPU rounds so in the generator of HiFT. F0 is predicted in float64. The kernels of the STFT
    and of its inverse have one channel, and a GPU does not round them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        from token2wav.kernels.rounding import tf32  # needs the Triton language

        if func in (torch.conv1d, torch.conv_transpose1d):
            x, weight, *rest = args
            if weight.dtype == torch.float32 and 1 not in weight.shape[:2]:
                args = tf32(x), tf32(weight), *rest
        return func(*args, **(kwargs or {}))


def _streamed(model: Token2Wav, voice: Voice | None, sentence: Sentence) -> list[Signal]:
    with model.stream(voice) as stream:
        return [chunk.audio for chunk in stream.push(sentence.tokens) + stream.finish()]


def _paced(model: Token2Wav, voice: Voice, pace: float, sentence: Sentence) -> list[Signal]:
    """Synthesizes at a pace of tokens on a simulated clock, with a player that buffers 0.2 s."""
    chunks, now = [], 0.0
    model.pipeline.clock = lambda: now
    with model.stream(voice) as stream:
        for token in sentence.tokens:
            chunks += stream.push(token[None])
            now += 1 / pace
        return [chunk.audio for chunk in chunks + stream.finish()]


def _served(client: Client, voice: ClientVoice, sentence: Sentence) -> list[Signal]:
    return [np.float32(chunk.audio) for chunk in client.synthesize([sentence.tokens], voice)]


def _measure(
    name: str, sentences: Sequence[Sentence], speak: Speak, recogniser: Recogniser
) -> dict[str, Any]:
    heard: list[str] = []
    scores: list[dict[str, float | None]] = []
    borders, there = Borders(), Borders()
    for sentence in tqdm(sentences, desc=name, leave=False):
        chunks = speak(sentence)
        audio = np.concatenate(chunks)
        heard.append(recogniser(audio))
        ends = np.cumsum([len(chunk) for chunk in chunks])[:-1].tolist()
        borders.add(audio, ends)
        there.add(sentence.recording[: len(audio)], ends)
        length = min(len(audio), len(sentence.recording))
        if name != ORIGINAL:
            original, result = sentence.recording[:length], audio[:length]
            scores.append(
                {
                    "stoi": intelligibility(original, result),
                    "pesq": perceptual(original, result),
                    "mcd_db": mel_cepstral_distortion(original, result),
                }
            )
    row: dict[str, Any] = {
        "wer": round(word_error_rate([sentence.text for sentence in sentences], heard), 4)
    }
    for key in scores[0] if scores else ():
        values = [value for score in scores if (value := score[key]) is not None]
        row[key] = round(sum(values) / len(values), 3) if values else None
    # Sentences begin and end quietly, and chunks end within a sentence. The jumps of the recordings
    # at the same places are the reference: they are not caused by borders of chunks.
    return {**row, "jumps": borders.report(), "recording_there": there.report(), "heard": heard}


def _line(name: str, row: dict[str, Any]) -> str:
    numbers = [row.get(key) for key in ("wer", "stoi", "pesq", "mcd_db")]
    jump = (
        f"{jumps['decibels']:+.1f} ± {jumps['standard_error']:.1f}"
        if (jumps := row["jumps"])
        else "-"
    )
    return " | ".join(
        [name, *("-" if number is None else f"{number:.3f}" for number in numbers), jump]
    )


def provenance(folder: Path) -> dict[str, Any]:
    """Reads the length of the training, if the model folder has it, and hashes of the weights."""
    weights = sorted(
        path for suffix in ("pt", "safetensors") for path in folder.glob(f"*.{suffix}")
    )
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in weights}
    training = folder / "training.json"
    return {
        **(json.loads(training.read_text(encoding="utf-8")) if training.is_file() else {}),
        "sha256": hashes,
    }


if __name__ == "__main__":
    main()
