"""Commands of `token2wav-client`: synthesize, check the server's health, print a voice's id."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import NoReturn, Protocol

from tqdm import tqdm

from token2wav_client.arguments import client_of
from token2wav_client.audio import SAMPLE_RATE, SAMPLES_PER_TOKEN, AudioArray
from token2wav_client.errors import OK, VoiceError
from token2wav_client.player import Player
from token2wav_client.stats import ChunkTiming, as_json, as_table, print_report, summarize
from token2wav_client.token_source import batches, open_tokens, paced
from token2wav_client.voice import ClientVoice, is_voice_id
from token2wav_client.writer import STANDARD_OUTPUT, AudioWriter


class Sink(Protocol):
    """Output of audio: a file, a pipe or a loudspeaker takes samples."""

    @property
    def samples(self) -> int:
        """Samples that were taken."""

    def write(self, audio: AudioArray, sample_rate: int) -> None:
        """Take samples, shape (samples,), at `sample_rate` per second."""


def synth(options: argparse.Namespace) -> int:
    """Speak one utterance into a file, a pipe or a loudspeaker, and report.

    Args:
        options: of the command `synth`.

    Raises:
        ClientError: anything that went wrong; audio received before that is kept, and said to be.
    """
    out: str | None = options.out
    if out is None and not options.play:
        options.refuse("one of the arguments --out --play is required")
    with client_of(options, retries=options.retry) as client, ExitStack() as stack:
        speaker = _speaker(options.voice, options.voice_id, options.voice_name)
        sinks: list[Sink] = []
        if out is not None:
            sinks.append(stack.enter_context(AudioWriter(out, options.audio_format, options.format)))
        if options.play:
            sinks.append(stack.enter_context(Player(options.audio_format)))
        source = open_tokens(options.tokens, options.codebooks)
        pieces = batches(source.pieces, options.tokens_per_request)
        if options.rate:
            pieces = paced(pieces, options.rate)
        timings: list[ChunkTiming] = []
        try:
            with _progress_bar(source.count, options.quiet) as bar:
                for chunk in client.synthesize(
                    pieces,
                    speaker,
                    audio_format=options.audio_format,
                    steps=options.steps,
                    sample_rate=options.sample_rate,
                ):
                    timings.append(ChunkTiming.of(chunk))
                    for sink in sinks:
                        sink.write(chunk.audio, chunk.sample_rate)
                    if source.count is not None:
                        bar.total = source.count * chunk.samples_per_token / chunk.sample_rate
                    bar.update(chunk.duration_s)
        except BaseException:
            if out is not None and sinks[0].samples:
                kept_s = sinks[0].samples / timings[0].sample_rate
                print(f"{out}: incomplete, {kept_s:.2f} s of audio kept", file=sys.stderr)
            raise
    stats = summarize(timings)
    report_to = sys.stderr if out == STANDARD_OUTPUT else sys.stdout
    if options.json:
        print_report(as_json(stats), report_to)
    elif not options.quiet:
        print_report(as_table(stats), report_to)
    return OK


def _speaker(file: str | None, voice_id: str | None, name: str | None) -> ClientVoice | str:
    if file is not None:
        return ClientVoice.load(file)
    if voice_id is not None and not is_voice_id(voice_id):
        raise VoiceError(f"voice id: {voice_id!r} is not 64 hexadecimal digits")
    if not (known := voice_id or name):
        raise VoiceError("voice: neither a file nor an id or a name was given")
    return known


def voice_id(options: argparse.Namespace) -> int:
    """Print the id of a voice file.

    Raises:
        VoiceError: it cannot be read.
    """
    print_report(ClientVoice.load(options.voice).id)
    return OK


def health(options: argparse.Namespace) -> int:
    """Speak three tokens and print in one line how long it took.

    Raises:
        ClientError: the server does not work; the class says in which way.
    """
    options.connect_timeout = min(options.connect_timeout, options.timeout)
    with client_of(options) as client:
        state = client.health(timeout_s=options.timeout, audio_format=options.audio_format)
    if state.first_audio_s is None:
        print_report(f"healthy, without room for another utterance: answered after {state.total_s:.3f} s")
    else:
        print_report(f"healthy: first audio after {state.first_audio_s:.3f} s, all of it after {state.total_s:.3f} s")
    return OK


def _progress_bar(tokens: int | None, quiet: bool) -> tqdm[NoReturn]:
    return tqdm(
        total=None if tokens is None else tokens * SAMPLES_PER_TOKEN / SAMPLE_RATE,
        unit="s",
        desc="audio",
        bar_format=None if tokens is None else "{desc} {bar} {n:.1f}/{total:.1f} s [{elapsed}]",
        disable=True if quiet else None,  # None: off where standard error is no terminal
    )
