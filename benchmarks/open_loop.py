"""Load test from tokens to sound, in an open loop: first audio, continuity and completeness.

Utterances start at random times (Poisson), even if the server falls behind. Their tokens arrive
faster than speech, as a language model sends them. docs/benchmarking.md defines the figures.

    .venv/bin/python -m benchmarks.open_loop --models demo_voice demo_codec --rates 1 2 4
    .venv/bin/python -m benchmarks.open_loop --models demo_voice --gateway --name open_loop_gateway
    .venv/bin/python -m benchmarks.open_loop --name open_loop_codecs --rates 0.5 1 2 4 8 \
        --seconds 8 --models mimi pocket_tts snac higgs dac qwen3_tts nanocodec moss bigvgan \
        streamflow

With `--gateway`, clients send text to a gateway, and a language model server answers the gateway
with stored tokens. The clients, the gateway and the language model share the cores with the server.
Prints a line for each rate, and the rows of the table in the README of the results; writes JSON,
and a file with the recordings (`token2wav_client.recordings`).
`benchmarks.pictures` draws the results.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from fastapi import FastAPI
from safetensors.numpy import save_file
from tqdm import tqdm

from benchmarks.environment import RESULTS, ROOT, describe, save
from examples.speech import language_model
from examples.speech.demo import TEMPLATE
from testkit.batches import Tokens
from testkit.models import bigvgan_model, streamflow_model
from testkit.models.caching_families import write_family
from testkit.models.codec_models import drawn_tokens
from testkit.models.golden import TINY
from testkit.models.published_codecs import DAC_NARROW, SIZES, moss_sizes, write_codec
from testkit.rigs.gateway_rig import serving, serving_gateway
from testkit.utterances import a_voice
from token2wav.config.model_config import ModelConfig
from token2wav.families.registry import read_config
from token2wav_client import AsyncClient, ClientError, ClientVoice
from token2wav_client.listening import (
    THRESHOLDS_MS,
    Recording,
    buffered,
    continuity,
    record,
    summary,
)
from token2wav_client.recordings import save_recordings
from token2wav_client.voice import FIELDS
from token2wav_gateway.settings import Settings
from token2wav_server import Ports, TritonServer

TRAINED = {
    "demo_voice": ROOT / "examples" / "demo_voice" / "model",
    "demo_codec": ROOT / "examples" / "demo_codec" / "model",
    "cosyvoice3": TINY,
}
# Names of the models for tables. A codec has its published size, unless the name says otherwise.
LABELS = {
    "demo_voice": "demo voice",
    "demo_codec": "demo codec",
    "cosyvoice3": "CosyVoice3, tiny",
    "cosyvoice2": "CosyVoice2, tiny",
    "stepaudio2": "Step-Audio2, MiniCPM-o, tiny",
    "chatterbox": "Chatterbox, tiny",
    "turbo": "Chatterbox Turbo, tiny",
    "streamflow": "StreamFlow, tiny",
    "bigvgan": "CosyVoice3 with BigVGAN at 16 kHz, tiny",
    "qwen3_tts": "Qwen3-TTS",
    "qwen3_omni": "Qwen3-Omni",
    "mimi": "Mimi",
    "pocket_tts": "Pocket TTS",
    "nanocodec": "NanoCodec",
    "dac": "DAC, a third of its width",
    "higgs": "Higgs Audio",
    "snac": "SNAC",
    "moss": "MOSS",
}
_GATEWAY_RATE_HZ = 24_000
_PROMPT_TOKENS = 50
_VOICE = "reader"
GATEWAY_REQUEST = {
    "model": "token2wav",
    "voice": _VOICE,
    "input": "Hello.",
    "response_format": "pcm",
}
_LEAST_RATE = 0.125  # utterances per second; a model with gaps at this rate gets no lower one
_LEAST_UTTERANCES = 6  # that are expected at a rate, which lengthens the runs of low rates
_LAG_S = 0.01  # largest lag of the clients with which figures of a rate are good

ROUNDING_S = 1e-4  # allowed difference of the length of the audio

# Audio of a chunk, and its sample rate.
Chunk = tuple[npt.NDArray[Any], int]
# Speaks one utterance, and yields its chunks.
Speak = Callable[[], AsyncIterator[Chunk]]


@dataclass(frozen=True)
class Subject:
    """Model under test, with the utterance that every client sends.

    Attributes:
        tokens: (N, *token_shape) tokens of the utterance.
        voice: voice of the utterance; None for a codec.
        speed: pace of the tokens as a multiple of the pace of speech.
    """

    config: ModelConfig
    tokens: Tokens
    voice: ClientVoice | None
    speed: float

    @classmethod
    def of(cls, folder: Path, seconds: float, speed: float) -> Subject:
        """Makes an utterance of some seconds for a model folder."""
        config = read_config(folder)
        tokens = drawn_tokens(config, round(seconds * config.token_frame_rate))
        voice = None
        if config.takes_voice:
            prompt_tokens = _PROMPT_TOKENS if config.takes_prompt else 0
            sizes = {"bands": config.mel_bands, "ratio": config.token_mel_ratio}
            random_voice = a_voice(prompt_tokens, **sizes)
            voice = ClientVoice(
                random_voice.prompt_tokens, random_voice.prompt_mel, random_voice.speaker_embedding
            )
        return cls(config, tokens, voice, speed)

    @property
    def tokens_per_second(self) -> float:
        return self.speed * self.config.token_frame_rate

    @property
    def audio_s(self) -> float:
        """Length of the audio of the utterance."""
        config = self.config
        samples = len(self.tokens) * config.samples_per_token - config.missing_samples
        return samples / config.sample_rate

    async def paced(self) -> AsyncIterator[Tokens]:
        """Yields the tokens one by one at their pace."""
        began = time.monotonic()
        for number, token in enumerate(self.tokens):
            await asyncio.sleep(began + number / self.tokens_per_second - time.monotonic())
            yield token[None]


@dataclass(frozen=True)
class Heard:
    """Utterance as a listener heard it, and the time by which the client began it too late."""

    recording: Recording
    lag_s: float


async def from_server(client: AsyncClient, subject: Subject) -> AsyncIterator[Chunk]:
    """Sends the tokens of an utterance to a token2wav server, and yields its audio."""
    async for chunk in client.synthesize(subject.paced(), subject.voice, audio_format="int16"):
        yield chunk.audio, chunk.sample_rate


async def from_gateway(http: httpx.AsyncClient) -> AsyncIterator[Chunk]:
    """Sends a text to a gateway, and yields its audio."""
    rest = b""
    async with http.stream("POST", "/v1/audio/speech", json=GATEWAY_REQUEST) as response:
        response.raise_for_status()
        async for content in response.aiter_raw():
            content = rest + content
            whole, rest = content[: len(content) // 2 * 2], content[len(content) // 2 * 2 :]
            yield np.frombuffer(whole, "<i2"), _GATEWAY_RATE_HZ


async def hear(speak: Speak, audio_s: float, at_s: float = 0.0, lag_s: float = 0.0) -> Heard:
    """Returns an utterance as heard. Errors of the server are a part of the result.

    Args:
        audio_s: expected length of the audio.
        at_s: time at which it should have begun, on the clock of the rate.
        lag_s: time by which it begins too late.
    """
    began, chunks, rate, error = time.monotonic(), list[tuple[float, Any]](), 1, ""
    try:
        async for chunk in speak():
            audio, rate = chunk
            chunks.append((time.monotonic() - began, audio))
    except (ClientError, httpx.HTTPError) as problem:
        error = str(problem)
    ended_s = time.monotonic() - began
    arrived_s = sum(len(audio) for _, audio in chunks) / rate
    complete = not error and abs(arrived_s - audio_s) <= ROUNDING_S
    recording = record(chunks, rate, ended_s, complete=complete, began_s=at_s + lag_s, error=error)
    return Heard(recording, lag_s)


async def run_rate(
    speak: Speak, audio_s: float, rate: float, seconds: float, seed: int
) -> list[Heard]:
    """Starts utterances at random times for some seconds, and waits until all have ended."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, max(1, round(2 * rate * seconds)))
    starts = [at for at in np.cumsum(gaps).tolist() if at < seconds] or [0.0]
    began = time.monotonic()

    async def start(at: float) -> Heard:
        await asyncio.sleep(began + at - time.monotonic())
        return await hear(speak, audio_s, at, time.monotonic() - began - at)

    return list(await asyncio.gather(*[start(at) for at in starts]))


def row(model: str, rate: float, heard: list[Heard]) -> dict[str, Any]:
    """Computes the figures of a rate."""
    recordings = [utterance.recording for utterance in heard]
    complete = [recording for recording in recordings if recording.complete]
    times: dict[str, list[float | None]] = {
        "first_playable_ms": [recording.first_playable_s for recording in complete],
        "first_audible_ms": [recording.first_audible_s for recording in complete],
        "leading_silence_ms": [recording.leading_silence_s for recording in complete],
        "gap_free_start_ms": [recording.gap_free_start_s for recording in complete],
        "scheduling_lag_ms": [utterance.lag_s for utterance in heard],
    }
    return {
        "model": model,
        "utterances_per_s": rate,
        "utterances": len(heard),
        "complete": len(complete),
        "errors": sorted({recording.error for recording in recordings if recording.error}),
        **{
            name: summary(None if value is None else 1000 * value for value in values)
            for name, values in times.items()
        },
        "underrun_utterances": sum(bool(recording.stalls_s) for recording in recordings),
        **{f"c{ms}": _share(continuity(recordings, ms)) for ms in THRESHOLDS_MS},
        **{f"buffer_{ms}": _share(buffered(recordings, ms)) for ms in THRESHOLDS_MS},
    }


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def good(result: dict[str, Any]) -> bool:
    """Returns whether all utterances of a rate were complete and free of gaps."""
    lag = result["scheduling_lag_ms"]
    return (
        result["complete"] == result["utterances"]
        and result["buffer_200"] == 1.0
        and lag["p99"] <= 1000 * _LAG_S
    )


def as_line(result: dict[str, Any]) -> str:
    def milliseconds(name: str) -> str:
        times = result[f"{name}_ms"]
        return f"{times['p50']:.0f} / {times['p99']:.0f}" if times else "-"

    return (
        f"{result['model']:11} {result['utterances_per_s']:6.2f}/s, {result['complete']} of "
        f"{result['utterances']} complete; p50 / p99 ms: first playable "
        f"{milliseconds('first_playable')}, audible {milliseconds('first_audible')}, gap-free "
        f"start {milliseconds('gap_free_start')}; "
        + ", ".join(f"buffer {ms} {result[f'buffer_{ms}']:.0%}" for ms in THRESHOLDS_MS)
        + f"; lag {milliseconds('scheduling_lag')}"
    )


def model_folder(name: str, parent: Path) -> Path:
    """Returns the folder of a model of `LABELS`. A model that is not in the repository gets random
    weights.
    """
    if name in TRAINED:
        return TRAINED[name]
    folder = parent / name
    if name == "streamflow":
        return streamflow_model.write_model(folder)
    if name == "bigvgan":
        return bigvgan_model.write_model(folder)
    folder.mkdir()
    if name == "dac":  # two cores do not compute the published width at the pace of speech
        return write_codec(name, folder, DAC_NARROW)
    if name == "moss":
        return write_codec(name, folder, moss_sizes())
    return (write_codec if name in SIZES else write_family)(name, folder)


@contextmanager
def gateway(grpc_url: str, subject: Subject) -> Iterator[tuple[str, FastAPI]]:
    """Runs a gateway and its language model server in threads.

    Yields:
        The URL of the gateway, and the language model server.
    """
    assert subject.voice is not None
    answer = language_model.create_app(
        lambda text: subject.tokens.tolist(), subject.tokens_per_second
    )
    with tempfile.TemporaryDirectory() as voices, serving(answer) as model_port:
        arrays = {name: getattr(subject.voice, name) for name in FIELDS}
        save_file(arrays, Path(voices) / f"{_VOICE}.safetensors")
        settings = Settings.model_validate(
            {
                "language_model": {
                    "url": f"http://127.0.0.1:{model_port}/v1",
                    "model": language_model.MODEL,
                    "template": str(TEMPLATE),
                },
                "speech_server": {"url": grpc_url},
                "voices": {"folder": voices},
                "limits": {"streams": 4_000},
            }
        )
        with serving_gateway(settings) as port:
            yield f"http://127.0.0.1:{port}", answer


async def measure(
    model: str,
    subject: Subject,
    grpc_url: str,
    gateway_url: str | None,
    options: argparse.Namespace,
    recordings: dict[str, list[Recording]],
) -> list[dict[str, Any]]:
    """Measures a server at several rates, and returns a row for each, from the lowest rate.

    Args:
        recordings: receives the recordings of each row, by the model and the rate.
    """
    rows: list[dict[str, Any]] = []
    no_limits = httpx.Limits(max_connections=None)
    async with (
        AsyncClient(grpc_url) as client,
        httpx.AsyncClient(base_url=gateway_url or "", timeout=60.0, limits=no_limits) as http,
    ):
        speak: Speak = partial(from_server, client, subject)
        if gateway_url is not None:
            speak = partial(from_gateway, http)
        await hear(speak, subject.audio_s)  # computes the prompt of the voice once
        with tqdm(total=len(options.rates), desc=model, unit="rate", leave=False) as bar:
            while (rate := next_rate(options.rates, rows)) is not None:
                seconds = max(options.seconds, _LEAST_UTTERANCES / rate)
                heard: list[Heard] = []
                for seed in range(options.repeats):
                    heard += await run_rate(speak, subject.audio_s, rate, seconds, seed)
                rows.append(row(model, rate, heard))
                recordings[f"{model}, {rate:g} a second"] = [one.recording for one in heard]
                bar.update()
                tqdm.write(as_line(rows[-1]))
    return sorted(rows, key=lambda row: row["utterances_per_s"])


def next_rate(rates: Sequence[float], rows: Sequence[dict[str, Any]]) -> float | None:
    """Returns the rate to measure after some rows; None if the search has ended.

    The rates rise until one is not good. If the lowest one is not good, it is halved until a rate
    is good.
    """
    if not rows:
        return min(rates)
    last = float(rows[-1]["utterances_per_s"])
    if all(map(good, rows)):
        return min((rate for rate in rates if rate > last), default=None)
    lower = last / 2
    return None if any(map(good, rows)) or lower < _LEAST_RATE else lower


def highest_rate(rows: list[dict[str, Any]]) -> float | None:
    """Returns the highest rate of one model without a gap; None if all rates have gaps."""
    return max((row["utterances_per_s"] for row in rows if good(row)), default=None)


def as_table_row(rows: list[dict[str, Any]]) -> str:
    """Returns the row of one model for the README of the results.

    The times and shares are from the lowest rate that was measured.
    """
    highest, lowest = highest_rate(rows), rows[0]
    times = (lowest["first_playable_ms"], lowest["gap_free_start_ms"])
    cells = (
        LABELS[lowest["model"]],
        "none" if highest is None else f"{highest:g}",
        *(f"{delay['p50']:.0f} / {delay['p99']:.0f} ms" if delay else "-" for delay in times),
        " / ".join(f"{100 * lowest[f'buffer_{ms}']:.0f}" for ms in THRESHOLDS_MS) + " %",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(LABELS)
    parser.add_argument(
        "--models", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
        help="utterances per second; a higher rate is skipped if a lower one had gaps, and lower "
        f"ones, down to {_LEAST_RATE:g}, are added if the lowest one had gaps",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="time in which utterances start; longer at low rates, so that "
        f"{_LEAST_UTTERANCES} utterances are expected",
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each rate")
    parser.add_argument("--utterance-seconds", type=float, default=6.0)
    parser.add_argument(
        "--speed", type=float, default=2.0, help="pace of the tokens, as a multiple of speech"
    )
    parser.add_argument(
        "--gateway", action="store_true", help="measure from the text, through a gateway"
    )
    parser.add_argument("--name", default="open_loop", help="name of the result files")
    options = parser.parse_args()
    facts = describe()
    rows: dict[str, list[dict[str, Any]]] = {}
    recordings: dict[str, list[Recording]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for model in options.models:
            folder = model_folder(model, Path(temporary))
            subject = Subject.of(folder, options.utterance_seconds, options.speed)
            with ExitStack() as stack:
                server = stack.enter_context(
                    TritonServer(folder, ports=Ports.free(), verbose=False)
                )
                url = None
                if options.gateway:
                    url, _ = stack.enter_context(gateway(server.grpc_url, subject))
                rows[model] = asyncio.run(
                    measure(model, subject, server.grpc_url, url, options, recordings)
                )
            # After each model, because all models together take many minutes.
            all_rows = [row for model_rows in rows.values() for row in model_rows]
            highest = {name: highest_rate(model_rows) for name, model_rows in rows.items()}
            save(options.name, {**facts, "highest_rate_without_gaps": highest, "rows": all_rows})
            save_recordings(RESULTS / f"{options.name}.npz", recordings)
    print("highest rate without a gap:", highest)
    print(*map(as_table_row, rows.values()), sep="\n")


if __name__ == "__main__":
    main()
