"""Commands of the client: synth, health, bench, voice-id and perf-data."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from token2wav_client import bench_picture
from token2wav_client.aio_client import AsyncClient
from token2wav_client.audio import SAMPLE_RATE, SAMPLES_PER_TOKEN
from token2wav_client.bench import VOICE_MISSING, Load, as_tables, figures, run
from token2wav_client.client import Client
from token2wav_client.connection import Tls
from token2wav_client.errors import InputError, OutputError, ServerError, TokenError, VoiceError
from token2wav_client.input_file import UNREADABLE, content_of, reason
from token2wav_client.listening import Recording
from token2wav_client.player import Player
from token2wav_client.stats import ChunkTiming, as_table, print_report, summarize
from token2wav_client.token_source import TokenSource, batches, open_tokens, paced
from token2wav_client.tokens import LATENTS, TokenArray, as_tokens, token_input
from token2wav_client.voice import FIELDS, ClientVoice, is_voice_id
from token2wav_client.writer import STANDARD_OUTPUT, AudioWriter

logger = logging.getLogger("token2wav_client")
TOKEN_VARIABLE = "TOKEN2WAV_TOKEN"
_SHAPE = re.compile(r"\bshape \([^)]*\)")
_LIMITS = {"repeats": "equal tokens in a row", "silence": "silence"}
_DECODER_NOISE = {None: None, "on": True, "off": False}  # values of --decoder-noise


def synth(options: argparse.Namespace) -> int:
    """Synthesizes one utterance into a file, a pipe or a loudspeaker, and prints a report.

    Audio that was received before an error is kept.
    """
    out: str | None = options.out
    if out is None and not options.play:
        options.refuse("one of the arguments --out --play is required")
    with _client(options, retries=options.retry) as client, ExitStack() as stack:
        speaker = _speaker(options)
        writer = player = None
        if out is not None:
            writer = stack.enter_context(AudioWriter(out, options.audio_format, options.format))
        if options.play:
            player = stack.enter_context(Player(options.audio_format))
        source = open_tokens(options.tokens, options.codebooks)
        pieces = batches(source.pieces, options.tokens_per_request)
        if options.rate:
            pieces = paced(pieces, options.rate)
        timings: list[ChunkTiming] = []
        try:
            expected_s = (
                None if source.count is None else source.count * SAMPLES_PER_TOKEN / SAMPLE_RATE
            )
            bar_format = (
                None if source.count is None else "{desc} {bar} {n:.1f}/{total:.1f} s [{elapsed}]"
            )
            # With None, tqdm shows no bar if standard error is not a terminal.
            disabled = True if options.quiet else None
            with (
                tqdm(
                    total=expected_s,
                    unit="s",
                    desc="audio",
                    bar_format=bar_format,
                    disable=disabled,
                ) as bar,
                _files_named(options, source),
            ):
                for chunk in client.synthesize(
                    pieces,
                    speaker,
                    audio_format=options.audio_format,
                    steps=options.steps,
                    sample_rate=options.sample_rate,
                    decoder_noise=_DECODER_NOISE[options.decoder_noise],
                    end_after_repeats=options.end_after_repeats,
                    end_after_silence_s=options.end_after_silence,
                    speed=options.speed,
                ):
                    if writer is not None:
                        writer.write(chunk.audio, chunk.sample_rate)
                    timings.append(ChunkTiming.of(chunk))
                    if player is not None:
                        player.write(chunk.audio, chunk.sample_rate)
                    if source.count is not None:
                        token_s = chunk.samples_per_token / chunk.sample_rate / options.speed
                        bar.total = source.count * token_s
                    bar.update(chunk.duration_s)
            if writer is not None:
                writer.close()  # it may fail as well, if the disk is too full for the last bytes
        except BaseException:
            if writer is not None and timings:
                name = "standard output" if out == STANDARD_OUTPUT else out
                written = f", {sum(timing.duration_s for timing in timings):.2f} s of audio written"
                with suppress(OutputError):
                    writer.close()  # only this shows what an encoder has lost
                shown = "" if writer.lacks_audio else written
                print(f"{name}: incomplete{shown}", file=sys.stderr)
            raise
    stats = summarize(timings)
    if stats.end_reason is not None:
        logger.warning(
            "the server ended the utterance after %.2f s of audio: %s",
            stats.audio_s,
            _LIMITS[stats.end_reason],
        )
    report_to = sys.stderr if out == STANDARD_OUTPUT else sys.stdout
    if options.json:
        print_report(json.dumps(asdict(stats)), report_to)
    elif not options.quiet:
        print_report(as_table(stats), report_to)
    return 0


@contextmanager
def _files_named(options: argparse.Namespace, source: TokenSource) -> Iterator[None]:
    """Context manager that rewrites errors in the tokens or in the voice for the command line.

    They name the file, its shape in place of the shape of a request, or the option for a voice.
    """
    try:
        yield
    except (InputError, ServerError) as error:
        text = str(error)
        field = text.partition(":")[0]
        tokens = "standard input" if options.tokens == "-" else options.tokens
        files = {"tokens": tokens, LATENTS: tokens} | dict.fromkeys(FIELDS, options.voice)
        file = files.get(field)
        speaker = options.voice or options.voice_id or options.voice_name
        if field in FIELDS and speaker is None:
            raise type(error)(VOICE_MISSING) from None
        if file is None or isinstance(error, OutputError) or text.startswith(f"{file}: "):
            raise
        if source.shape is not None and file == tokens:
            text = _SHAPE.sub(f"shape {source.shape}", text, count=1)
        raise type(error)(f"{file}: {text}") from None


def _speaker(options: argparse.Namespace) -> ClientVoice | str | None:
    if options.voice is not None:
        return ClientVoice.load(options.voice)
    if options.voice_id is not None and not is_voice_id(options.voice_id):
        raise VoiceError(f"voice id: {options.voice_id!r} is not 64 hexadecimal digits")
    return options.voice_id or options.voice_name


def voice_id(options: argparse.Namespace) -> int:
    """Prints the id of a voice file."""
    print_report(ClientVoice.load(options.voice).id)
    return 0


def health(options: argparse.Namespace) -> int:
    """Synthesizes three tokens and prints in one line how long the synthesis took."""
    options.connect_timeout = min(options.connect_timeout, options.timeout)
    with _client(options) as client:
        state = client.health(timeout_s=options.timeout, audio_format=options.audio_format)
    if state.first_audio_s is None:
        print_report(f"healthy, but all streams are in use: answered after {state.total_s:.3f} s")
    else:
        print_report(
            f"healthy: first audio after {state.first_audio_s:.3f} s, complete audio after "
            f"{state.total_s:.3f} s"
        )
    return 0


def bench(options: argparse.Namespace) -> int:
    """Measures a running server, prints tables, and writes figures, recordings and a picture.

    If the benchmark is interrupted, the rows that are complete are written.
    """
    out = Path("bench.json") if options.recordings is None else None
    if options.out is not None:
        out = Path(options.out)
    if out is not None and not out.parent.is_dir():
        raise OutputError(f"{out}: cannot be written (the folder does not exist)")
    if out is not None and out.suffix == ".png":
        raise OutputError(f"{out}: is the name of the picture; name the JSON file")
    if options.recordings is not None:
        _report(*_recordings_in(Path(options.recordings)), out, options.quiet)
        return 0
    load = Load(
        tuple(dict.fromkeys(options.streams)),
        options.rounds,
        options.row_seconds,
        options.utterance_seconds,
        options.rate,
    )
    tokens = None if options.tokens is None else _tokens_in(options.tokens, options.codebooks or 1)
    voice, connection = _speaker(options), _connection(options)
    facts = {
        "date": date.today().isoformat(),
        "url": options.url,
        "model": options.model,
        "tokens": options.tokens or "random",
        **{name: value for name, value in asdict(load).items() if name != "streams"},
    }
    rows = dict[int, list[Recording]]()

    async def measure(bar: Any) -> None:
        async with AsyncClient(**connection) as client:
            await run(client, load, voice, tokens, options.codebooks, rows, lambda _: bar.update())

    disabled = True if options.quiet else None
    try:
        with tqdm(total=len(load.streams), desc="bench", unit="row", disable=disabled) as bar:
            asyncio.run(measure(bar))
    finally:
        if rows:
            _report(rows, facts, out, options.quiet)
    return 0


def _recordings_in(path: Path) -> tuple[dict[int, list[Recording]], dict[str, Any]]:
    """Reads a file of `_report`: the recordings of each number of streams, and the facts."""
    try:
        facts = dict(json.loads(content_of(path)))
        rows = dict(facts.pop("recordings"))
        read = {int(streams): list(map(Recording.of_json, row)) for streams, row in rows.items()}
        if min(read, default=1) < 1:
            raise ValueError(f"{min(read)} streams")
        return read, facts
    except UNREADABLE as error:
        raise InputError(f"{path}: cannot read recordings ({reason(error)})") from None


def _report(
    rows: dict[int, list[Recording]], facts: dict[str, Any], out: Path | None, quiet: bool
) -> None:
    """Prints the tables of a benchmark, and writes its figures, its recordings and its picture."""
    table = [figures(streams, recordings) for streams, recordings in rows.items()]
    if not quiet:
        print_report(as_tables(table))
    if out is None:
        return
    heard = {streams: [one.as_json() for one in recordings] for streams, recordings in rows.items()}
    try:
        content = {**facts, "rows": table, "recordings": heard}
        out.write_text(json.dumps(content, indent=1) + "\n")
        bench_picture.draw(table, out.with_suffix(".png"))
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({reason(error)})") from None
    except ModuleNotFoundError as error:
        print(
            f"token2wav bench: no picture, because the module {error.name} is missing; run: pip "
            "install 'token2wav[bench]'",
            file=sys.stderr,
        )


def _tokens_in(file: str, codebooks: int = 1) -> TokenArray:
    """Reads all tokens of a file; raises TokenError if there are none."""
    pieces = [as_tokens(piece) for piece in open_tokens(file, codebooks).pieces]
    if not sum(map(len, pieces)):
        raise TokenError(f"{file}: tokens: 0 found; an utterance needs at least 1")
    return np.concatenate(pieces)


def perf_data(options: argparse.Namespace) -> int:
    """Writes an utterance as input data for perf_analyzer: JSON with one stream of one step.

    The server rejects the tensors that NVIDIA's perf_analyzer generates: tokens must be in the
    vocabulary, and the prompt mel must match the prompt tokens.
    """
    tokens = _tokens_in(options.tokens)
    if options.length is not None:
        tokens = np.resize(tokens, (options.length, *tokens.shape[1:]))
    arrays = {token_input(tokens): tokens}
    if options.voice is not None:
        voice = ClientVoice.load(options.voice)
        if tokens.shape[1:] != voice.prompt_tokens.shape[1:]:
            raise TokenError(
                f"{options.tokens}: tokens: shape {tokens.shape}, but prompt_tokens of "
                f"{options.voice} have the shape {voice.prompt_tokens.shape}; the number of "
                "codes in a token must be the same in both"
            )
        arrays |= {name: getattr(voice, name) for name in FIELDS}
    # perf_analyzer reads flat lists. The shapes are dynamic, so every tensor needs its shape.
    step = {
        name: {"content": array.ravel().tolist(), "shape": list(array.shape)}
        for name, array in arrays.items()
    }
    try:
        Path(options.out).write_text(json.dumps({"data": [step]}) + "\n")
    except OSError as error:
        raise OutputError(f"{options.out}: cannot be written ({reason(error)})") from None
    print_report(f"{options.out}: an utterance of {len(tokens)} tokens")
    return 0


def _client(options: argparse.Namespace, retries: int = 0) -> Client:
    return Client(**_connection(options), retries=retries)


def _connection(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of a client from the options of `cli.add_connection`."""
    files = {name: getattr(options, name) for name in ("ca", "cert", "key", "server_name")}
    encrypted = options.tls or any(value is not None for value in files.values())
    return {
        "url": options.url,
        "model": options.model,
        "connect_timeout_s": options.connect_timeout,
        "response_timeout_s": options.timeout,
        "tls": Tls(**files) if encrypted else None,
        "headers": dict(options.header or []),
        "token": _token(options.token_file),
        "max_message_mib": options.max_message_mib,
        "keepalive_s": options.keepalive,
    }


def _token(file: str | None) -> str | None:
    """Reads the access token from its file or from the environment.

    The command has no option for the token itself, because every user of the machine can read the
    arguments of a process.
    """
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"token-file: cannot read {file} ({reason(error)})") from None
    if not token:
        raise InputError(f"token-file: {file} is empty")
    return token
