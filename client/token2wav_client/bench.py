"""Benchmark of a running server: NVIDIA's table for text to speech, and the figures of the field.

The load is NVIDIA's, as for Riva: N parallel streams, a closed loop, some rounds. Each stream sends
an utterance, waits until all of its audio has arrived, and sends the next one. The utterances have
ten lengths, and every stream begins with another one. `listening.py` defines the figures.

A row has a time limit. Utterances that are open at the limit are cut: the audio that arrived counts
for latencies and throughput, but not for continuity and real-time factors (sglang-omni does the
same with streams that are interrupted).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from token2wav_client.aio_client import AsyncClient, TokenBatches, send_all
from token2wav_client.errors import ClientError, InputError, VoiceError
from token2wav_client.health import Examination
from token2wav_client.listening import (
    THRESHOLDS_MS,
    Recording,
    buffered,
    continuity,
    milliseconds,
    record,
    summary,
    throughput,
)
from token2wav_client.tokens import TokenArray
from token2wav_client.voice import ClientVoice

STREAMS = (1, 4, 8, 16, 32)
VOICE_MISSING = (
    "voice: missing, but this model needs one; add --voice FILE, --voice-name NAME or --voice-id ID"
)
_LENGTHS = 10  # of utterances; NVIDIA has ten sentences
_SHORTEST, _LONGEST = 0.5, 1.5  # relative to the mean length
_PROBE_TOKENS = 8
_SEED = 0

Voice = ClientVoice | str | None


@dataclass(frozen=True)
class Load:
    """Load of a benchmark."""

    streams: Sequence[int] = STREAMS  # numbers of parallel streams, a row for each
    rounds: int = 20  # utterances that each stream sends at most
    row_seconds: float = 20.0  # time limit of a row
    utterance_seconds: float = 6.0  # mean duration of the audio of an utterance
    tokens_per_second: float = 0.0  # pace of the tokens; 0 sends all tokens of an utterance at once


@dataclass(frozen=True)
class Tokens:
    """Tokens of a model: from a file, or drawn at random.

    Attributes:
        file_tokens: (N, ...) tokens or latents of a file, cut or repeated; None draws them.
        token_shape: () for integers, (codebooks,) or (size,).
        vocabulary: different codes in each codebook; empty for latents.
    """

    file_tokens: TokenArray | None
    token_shape: tuple[int, ...] = ()
    vocabulary: tuple[int, ...] = ()

    def take(self, count: int, random: np.random.Generator) -> TokenArray:
        """Returns `count` tokens."""
        if self.file_tokens is not None:
            return np.resize(self.file_tokens, (count, *self.file_tokens.shape[1:]))
        shape = (count, *self.token_shape)
        if not self.vocabulary:
            return random.standard_normal(shape, np.float32)
        sizes = self.vocabulary if self.token_shape else self.vocabulary[0]
        return random.integers(0, sizes, shape).astype(np.int32)


async def run(
    client: AsyncClient,
    load: Load,
    voice: Voice,
    file_tokens: TokenArray | None,
    codebooks: int | None,
    rows: dict[int, list[Recording]],
    on_row: Callable[[int], object],
) -> None:
    """Measures all rows. Raises ClientError if the server is not there, or cannot synthesize the
    first utterance.

    Args:
        voice: voice of all utterances, or its id or name; None for a model without voices.
        file_tokens: tokens of a file; None draws them at random.
        codebooks: codes in each random token; None for all codebooks of the model.
        rows: receives the recordings of each row, by its number of streams.
        on_row: is called after each row with its number of streams.
    """
    tokens = await _tokens(client, voice, file_tokens, codebooks)
    random = np.random.default_rng(_SEED)
    # The first utterance also registers the voice, and the server computes its prompt.
    token_rate = await _token_rate(client, tokens.take(_PROBE_TOKENS, random), voice)
    seconds = load.utterance_seconds * np.linspace(_SHORTEST, _LONGEST, _LENGTHS)
    utterances = [
        tokens.take(max(1, round(token_rate * length)), random) for length in seconds.tolist()
    ]
    warm_up = Load((1,), 1, load.row_seconds, load.utterance_seconds, load.tokens_per_second)
    await run_row(client, warm_up, 1, utterances, voice)
    for streams in load.streams:
        rows[streams] = await run_row(client, load, streams, utterances, voice)
        on_row(streams)


async def run_row(
    client: AsyncClient,
    load: Load,
    streams: int,
    utterances: Sequence[TokenArray],
    voice: Voice,
) -> list[Recording]:
    """Runs one row: parallel streams in a closed loop, until the rounds or the time are over."""
    began, recordings = time.monotonic(), list[Recording]()

    async def stream(number: int) -> None:
        for turn in range(load.rounds):
            tokens = utterances[(number + turn) % len(utterances)]
            await _speak(client, tokens, voice, load.tokens_per_second, began, recordings)

    tasks = [asyncio.create_task(stream(number)) for number in range(streams)]
    try:
        _, late = await asyncio.wait(tasks, timeout=load.row_seconds)
    finally:
        for task in tasks:
            task.cancel()
    if late:
        await asyncio.wait(late)
    for task in tasks:
        if not task.cancelled():
            task.result()  # raises errors that are no errors of the server
    return recordings


async def _speak(
    client: AsyncClient,
    tokens: TokenArray,
    voice: Voice,
    tokens_per_second: float,
    row_began: float,
    recordings: list[Recording],
) -> None:
    """Synthesizes one utterance, and appends its recording, also if it is cut or fails."""
    chunks, rate, complete, problem = list[tuple[float, Any]](), 1, False, ""
    async with await client.open(voice, audio_format="int16") as utterance:
        zero = time.monotonic()
        batches: TokenBatches = paced(tokens, tokens_per_second) if tokens_per_second else [tokens]
        sender = asyncio.create_task(send_all(utterance, batches))
        try:
            async for chunk in utterance:
                chunks.append((chunk.arrival_s, chunk.audio))
                rate = chunk.sample_rate
            complete = True
        except ClientError as error:
            problem = str(error)
        finally:
            ended_s, began_s = time.monotonic() - zero, zero - row_began
            sender.cancel()
            recordings.append(
                record(chunks, rate, ended_s, complete=complete, began_s=began_s, error=problem)
            )


async def paced(
    tokens: TokenArray, tokens_per_second: float, size: int = 1
) -> AsyncIterator[TokenArray]:
    """Yields tokens in portions, each when its last token is due; the first token at once."""
    began = time.monotonic()
    for start in range(0, len(tokens), size):
        portion = tokens[start : start + size]
        due = began + (start + len(portion) - 1) / tokens_per_second
        await asyncio.sleep(due - time.monotonic())
        yield portion


async def _tokens(
    client: AsyncClient, voice: Voice, file_tokens: TokenArray | None, codebooks: int | None
) -> Tokens:
    """Asks the server which tokens the model takes."""
    await client._await_ready(retries=0)
    with client._grpc_errors():
        shapes = Examination(await client._ask("ModelMetadata"), timeout_s=0.0)
    if shapes.voice is not None and voice is None:
        raise VoiceError(VOICE_MISSING)
    token_shape = shapes.tokens.shape[1:]
    if file_tokens is not None or shapes.tokens.dtype == np.float32:
        return Tokens(file_tokens, token_shape)
    sizes = await client.vocabulary()
    if not sizes:
        raise InputError(
            "tokens: the server does not publish the vocabulary of its model; add --tokens FILE"
        )
    if codebooks is not None and not 0 < codebooks <= len(sizes):
        raise InputError(f"codebooks: {codebooks}, but a token of this model has {len(sizes)}")
    sizes = sizes[:codebooks]
    return Tokens(None, (len(sizes),) if token_shape else (), sizes)


async def _token_rate(client: AsyncClient, tokens: TokenArray, voice: Voice) -> float:
    """Synthesizes a short utterance, and returns the tokens of a second of audio."""
    rate = 0.0
    async for chunk in client.synthesize([tokens], voice, audio_format="int16"):
        rate = chunk.sample_rate / chunk.samples_per_token
    return rate


def figures(streams: int, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Computes the figures of a row. docs/benchmarking.md defines them."""
    cut = [recording for recording in recordings if not (recording.complete or recording.error)]
    ended = [recording for recording in recordings if recording.complete or recording.error]
    complete = [recording for recording in recordings if recording.complete]
    rtfx = throughput(recordings)
    return {
        "streams": streams,
        "complete": len(complete),
        "cut": len(cut),
        "cut_without_audio": sum(not len(recording.samples) for recording in cut),
        "failed": len(ended) - len(complete),
        "errors": sorted({recording.error for recording in recordings if recording.error}),
        "first_audio_ms": milliseconds(recording.first_playable_s for recording in recordings),
        "between_chunks_ms": milliseconds(
            interval for recording in recordings for interval in recording.intervals_s.tolist()
        ),
        "rtfx": None if rtfx is None else round(rtfx, 3),
        "rtfx_of_a_stream": None if rtfx is None else round(rtfx / streams, 3),
        "first_audible_ms": milliseconds(recording.first_audible_s for recording in recordings),
        "leading_silence_ms": milliseconds(recording.leading_silence_s for recording in recordings),
        "underrun_utterances": sum(bool(recording.stalls_s) for recording in complete),
        "largest_stall_ms": milliseconds(recording.largest_stall_s for recording in complete),
        **{f"c{ms}": _share(continuity(ended, ms)) for ms in THRESHOLDS_MS},
        "real_time_factor": summary((recording.real_time_factor for recording in complete), 3),
        "streaming_real_time_factor": summary(
            (recording.streaming_real_time_factor for recording in complete), 3
        ),
        "gap_free_start_ms": milliseconds(recording.gap_free_start_s for recording in complete),
        **{f"buffer_{ms}": _share(buffered(ended, ms)) for ms in THRESHOLDS_MS},
    }


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


_QUANTILES = ("mean", "p50", "p90", "p95", "p99")


def as_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats rows as two tables: NVIDIA's, and the figures of the field and of this project."""
    nvidia = [
        f"{'':>7}  {'utterances':^13}  {'latency to first audio, ms':^39}  "
        f"{'latency between chunks, ms':^39}  {'RTFX':^14}",
        f"{'streams':>7}  {'done':>4} {'cut':>3} {'fail':>4}  "
        + "  ".join([" ".join(f"{name:>7}" for name in _QUANTILES)] * 2)
        + f"  {'all':>7} {'each':>6}",
    ]
    field = [
        f"{'':>7}  {'first audible, ms':^15}  {'':>9}  {'C50':>5} {'C100':>5} {'C200':>5}  "
        f"{'real-time factor':^16}  {'gap-free start':^15}  {'buffer, ms':^17}",
        f"{'streams':>7}  {'p50':>7} {'p95':>7}  {'underruns':>9}  {'%':>5} {'%':>5} {'%':>5}  "
        f"{'whole':>7} {'stream':>8}  {'p50, ms':>7} {'p95, ms':>7}  "
        f"{'50, %':>5} {'100':>5} {'200':>5}",
    ]
    for row in rows:
        streams = row["streams"]
        nvidia.append(
            f"{streams:>7}  {row['complete']:>4} {row['cut']:>3} {row['failed']:>4}  "
            + "  ".join(
                " ".join(_cell(row[name], quantile, 7, 1) for quantile in _QUANTILES)
                for name in ("first_audio_ms", "between_chunks_ms")
            )
            + f"  {_number(row['rtfx'], 7, 2)} {_number(row['rtfx_of_a_stream'], 6, 2)}"
        )
        field.append(
            f"{streams:>7}  {_cell(row['first_audible_ms'], 'p50', 7, 1)} "
            f"{_cell(row['first_audible_ms'], 'p95', 7, 1)}  "
            f"{row['underrun_utterances']:>9}  "
            + " ".join(_percent(row[f"c{ms}"]) for ms in THRESHOLDS_MS)
            + f"  {_cell(row['real_time_factor'], 'p50', 7, 3)} "
            f"{_cell(row['streaming_real_time_factor'], 'p50', 8, 3)}  "
            f"{_cell(row['gap_free_start_ms'], 'p50', 7, 1)} "
            f"{_cell(row['gap_free_start_ms'], 'p95', 7, 1)}  "
            + " ".join(_percent(row[f"buffer_{ms}"]) for ms in THRESHOLDS_MS)
        )
    notes = [
        f"{row['streams']} streams: {row['cut_without_audio']} utterances had no audio yet at the "
        "time limit, and are not in the latencies"
        for row in rows
        if row["cut_without_audio"]
    ]
    return "\n".join([*nvidia, "", *field, *notes])


def _cell(values: Mapping[str, float] | None, name: str, width: int, digits: int) -> str:
    return _number(None if values is None else values[name], width, digits)


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def _percent(share: float | None) -> str:
    return _number(None if share is None else 100 * share, 5, 1)
