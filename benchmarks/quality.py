"""Quality of the demo voice: words understood, closeness to recordings, and whether chunks can be heard are measured.

Records sentences that the model never heard, turns them into tokens, and speaks them in every way that the library
has: all at once, as streams, with bounded history, with fewer ODE steps, with cheaper numbers; and once through a real
server and the client. Writes a table, JSON and a plot.

    .venv/bin/python -m benchmarks.quality
    .venv/bin/python -m benchmarks.quality --text examples/demo_voice/unseen.txt --name quality_unseen

The recordings need `pip install -e '.[demo]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from tqdm import tqdm

from benchmarks.environment import RESULTS, ROOT, describe, save
from benchmarks.quality_scores import (
    Borders,
    Recogniser,
    Signal,
    intelligibility,
    mel_cepstral_distortion,
    perceptual,
    resampled,
    word_error_rate,
)
from examples.demo_voice.export import MODEL
from examples.demo_voice.recordings import PROMPT, record
from examples.demo_voice.text import HELD_OUT, held_out
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.execution.backends import Host
from token2wav.families.cosyvoice3.build import build_engines
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav_client import Client, ClientVoice
from token2wav_server import Ports, TritonServer
from token2wav_voice import FrontEnd, PromptVoice, Recording
from token2wav_voice.features import prompt_mel

mpl.use("Agg")
from matplotlib import pyplot as plt

RECORDINGS = ROOT / "out" / "quality"
WINDOWS = (1, 2, 4, 8)
STEPS = (10, 5, 3, 2)  # those of them that are not the model's own
ORIGINAL, VOCODED, WHOLE = "recording", "mel of the recording", "whole sequence"
STREAMING, SERVER = "streaming", "through the server"

ON_CPU = RuntimeConfig(device="cpu", engine="torch")

Chunks = list[Signal]
Speak = Callable[["Sentence"], Chunks]


@dataclass(frozen=True, eq=False)
class Sentence:
    """Sentence that is said, with its recording and the tokens of that."""

    text: str
    recording: Signal
    tokens: np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Mode:
    """Mode of speaking.

    Attributes:
        name: name in the table.
        stream, runtime: settings of the model.
        steps: number of ODE steps; None for the model's own.
    """

    name: str
    stream: StreamConfig = field(default_factory=StreamConfig)
    runtime: RuntimeConfig = ON_CPU
    steps: int | None = None

    def load(self, folder: Path) -> Token2Wav:
        """Loads the model of a folder, to be run like this."""
        config = CosyVoice3Config.read(folder)
        if self.steps:
            config = dataclasses.replace(
                config, ode_steps=self.steps, flow=dataclasses.replace(config.flow, n_timesteps=self.steps)
            )
        host = Host(folder, self.runtime, torch.device("cpu"))
        return Token2Wav(config, *build_engines(host, config, self.stream)[:2], self.stream)


def modes(own_steps: int) -> Iterator[Mode]:
    """Lists all streaming modes; the first is the default one."""
    yield Mode(STREAMING)
    for blocks in WINDOWS:
        yield Mode(f"left_blocks {blocks}", StreamConfig(hop="fixed", left_blocks=blocks))
    for steps in STEPS:
        if steps != own_steps:
            yield Mode(f"{steps} steps", steps=steps)
    yield Mode("float16", runtime=dataclasses.replace(ON_CPU, precision="float16"))
    yield Mode("int8 cache", runtime=dataclasses.replace(ON_CPU, cache_storage="int8"))


def main() -> None:
    """Measures all, prints a table, writes the results."""
    parser = argparse.ArgumentParser(description="Measure how well the demo voice speaks.")
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder (default: the demo's)")
    parser.add_argument("--text", type=Path, default=HELD_OUT, help="one sentence a line (default: the held-out ones)")
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, help="where recordings are kept")
    parser.add_argument("--sentences", type=int, help="how many of the sentences (default: all)")
    parser.add_argument("--only", nargs="+", metavar="MODE", help="only these rows of the table, and the recordings")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--name", default="quality", help="of the results")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    front_end = FrontEnd(options.model)
    prompt = front_end.voice(Recording.load(PROMPT))
    paths = record(options.recordings, options.text)[: options.sentences]
    texts = held_out(options.text)[: len(paths)]
    sentences = [_sentence(front_end, path, text) for path, text in zip(paths, texts, strict=True)]
    recogniser = Recogniser()
    subject = {"model": _provenance(options.model), "text": options.text.name, "sentences": len(sentences)}
    rows = _rows_so_far(options.name, subject)
    print("mode | WER | STOI | PESQ | MCD dB | jump dB | flux dB")
    for name, speak in _ways(options.model, prompt):
        if name not in rows and (not options.only or name in (*options.only, ORIGINAL)):
            with ExitStack() as stack:
                rows[name] = _measure(name, sentences, speak(stack), recogniser)
            for other in (ORIGINAL, WHOLE):
                if other in rows and other != name and len(texts) > 1:
                    rows[name][f"against {other}"] = resampled(texts, rows[name]["heard"], rows[other]["heard"])
            save(options.name, {"environment": describe("jiwer", "pocketsphinx", "pystoi"), **subject, "rows": rows})
        if name in rows:
            print(_line(name, rows[name]), flush=True)
    _plot(rows, RESULTS / f"{options.name}.png")


def _rows_so_far(name: str, subject: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Reads rows of an earlier run on the same weights and sentences, which can so be stopped and gone on with."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return {}
    earlier = json.loads(path.read_text(encoding="utf-8"))
    return earlier["rows"] if all(earlier.get(key) == value for key, value in subject.items()) else {}


def _sentence(front_end: FrontEnd, path: Path, text: str) -> Sentence:
    recording = Recording.load(path)
    return Sentence(text, recording.samples, front_end.tokens(recording))


def _ways(folder: Path, prompt: PromptVoice) -> Iterator[tuple[str, Callable[[ExitStack], Speak]]]:
    """Lists every row of the table, and what prepares it; what it starts ends with the stack."""
    voice = Voice(prompt.prompt_tokens, prompt.prompt_mel, prompt.speaker_embedding)
    yield ORIGINAL, lambda _: lambda sentence: [sentence.recording]
    yield VOCODED, lambda _: _vocoded(Mode(WHOLE).load(folder))
    yield WHOLE, lambda _: _whole(Mode(WHOLE).load(folder), voice)
    own_steps, most = CosyVoice3Config.read(folder).flow.n_timesteps, max(STEPS)
    if own_steps != most:
        yield f"{WHOLE}, {most} steps", lambda _: _whole(Mode(WHOLE, steps=most).load(folder), voice)
    for mode in modes(own_steps):
        yield mode.name, partial(_prepared, mode, folder, voice)
    yield SERVER, lambda stack: _served(stack, folder, prompt)


def _prepared(mode: Mode, folder: Path, voice: Voice, _: ExitStack) -> Speak:
    return _streamed(mode.load(folder), voice)


def _vocoded(model: Token2Wav) -> Speak:
    return lambda sentence: [model.vocode(prompt_mel(sentence.recording).T)]


def _whole(model: Token2Wav, voice: Voice) -> Speak:
    return lambda sentence: [model.vocode(model.mel(sentence.tokens, voice, streaming=False))]


def _streamed(model: Token2Wav, voice: Voice) -> Speak:
    def speak(sentence: Sentence) -> Chunks:
        with model.stream(voice) as stream:
            return [chunk.audio for chunk in stream.push(sentence.tokens) + stream.finish()]

    return speak


def _served(stack: ExitStack, folder: Path, prompt: PromptVoice) -> Speak:
    server = stack.enter_context(TritonServer(folder, ports=Ports.free(), verbose=False))
    client = stack.enter_context(Client(server.grpc_url))
    voice = ClientVoice(prompt.prompt_tokens, prompt.prompt_mel, prompt.speaker_embedding)
    return lambda sentence: [np.float32(chunk.audio) for chunk in client.synthesize([sentence.tokens], voice)]


def _measure(name: str, sentences: Sequence[Sentence], speak: Speak, recogniser: Recogniser) -> dict[str, Any]:
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
    row: dict[str, Any] = {"wer": round(word_error_rate([sentence.text for sentence in sentences], heard), 4)}
    for key in scores[0] if scores else ():
        found = [value for score in scores if (value := score[key]) is not None]
        row[key] = round(sum(found) / len(found), 3) if found else None
    # Sentences begin and end quietly, chunks end within them: what recordings have at the same places is no border.
    return {**row, "borders": borders.report(), "recording_there": there.report(), "heard": heard}


def _line(name: str, row: dict[str, Any]) -> str:
    numbers = [row.get(key) for key in ("wer", "stoi", "pesq", "mcd_db")]
    borders = [_with_error(row["borders"].get(key)) for key in ("jumps", "fluxes")]
    return " | ".join([name, *("-" if number is None else f"{number:.3f}" for number in numbers), *borders])


def _with_error(found: dict[str, float] | None) -> str:
    return f"{found['decibels']:+.1f} ± {found['standard_error']:.1f}" if found else "-"


def _provenance(folder: Path) -> dict[str, Any]:
    """Reads how long the model was trained, if its folder says so, and hashes that tell its weights from others."""
    weights = sorted(path for suffix in ("pt", "safetensors") for path in folder.glob(f"*.{suffix}"))
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in weights}
    training = folder / "training.json"
    return {**(json.loads(training.read_text(encoding="utf-8")) if training.is_file() else {}), "sha256": hashes}


def _plot(rows: dict[str, dict[str, Any]], path: Path) -> None:
    figure, panels = plt.subplots(1, 3, figsize=(12, 0.35 * len(rows) + 1), sharey=True, layout="constrained")
    titles = {"wer": "word error rate", "stoi": "STOI", "mcd_db": "mel-cepstral distortion, dB"}
    for panel, (key, title) in zip(panels, titles.items(), strict=True):
        panel.barh(list(rows), [row.get(key) or 0.0 for row in rows.values()])
        panel.set_title(title)
    panels[0].axvline(1.5 * rows[ORIGINAL]["wer"], color="black", linestyle=":")
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    main()
