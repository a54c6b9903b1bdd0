"""What the subcommands do, once their arguments are understood."""

from __future__ import annotations

import sys
from typing import NoReturn

from tqdm import tqdm

from token2wav_client.audio import SAMPLE_RATE, SAMPLES_PER_TOKEN, AudioFormat
from token2wav_client.client import Client
from token2wav_client.errors import OK, VoiceError
from token2wav_client.report import as_json, as_table
from token2wav_client.stats import ChunkTiming, summarize
from token2wav_client.token_source import batches, open_tokens, paced
from token2wav_client.voice import ClientVoice
from token2wav_client.writer import Subtype, WavWriter


def synth(
    client: Client,
    *,
    tokens: str,
    voice: str | None,
    voice_id: str | None,
    out: str,
    tokens_per_second: float,
    tokens_per_request: int,
    audio_format: AudioFormat,
    subtype: Subtype,
    report_json: bool,
    quiet: bool,
) -> int:
    """Speak one utterance into a WAV file and report; closes the client.

    Raises:
        ClientError: anything that went wrong; audio received before that is kept, and said to be.
    """
    with client:
        speaker = voice_id if voice is None else ClientVoice.load(voice)
        if speaker is None:
            raise VoiceError("voice: neither a file nor an id was given")
        writer = WavWriter(out, subtype)
        source = open_tokens(tokens)
        pieces = batches(source.pieces, tokens_per_request)
        if tokens_per_second:
            pieces = paced(pieces, tokens_per_second)
        timings: list[ChunkTiming] = []
        try:
            with _progress_bar(source.count, quiet) as bar:
                for chunk in client.synthesize(pieces, speaker, audio_format=audio_format):
                    timings.append(ChunkTiming.of(chunk))
                    writer.write(chunk.audio)
                    bar.update(chunk.duration_s)
        except BaseException:
            if writer.samples:
                kept_s = writer.samples / SAMPLE_RATE
                print(f"{out}: incomplete, {kept_s:.2f} s of audio kept", file=sys.stderr)
            raise
    stats = summarize(timings)
    if report_json:
        print(as_json(stats))
    elif not quiet:
        print(as_table(stats))
    return OK


def voice_id(path: str) -> int:
    """Print the id of a voice file.

    Raises:
        VoiceError: it cannot be read.
    """
    print(ClientVoice.load(path).id)
    return OK


def health(client: Client, *, timeout_s: float, audio_format: AudioFormat) -> int:
    """Speak three tokens and print in one line how long it took; closes the client.

    Raises:
        ClientError: the server does not work; the class says in which way.
    """
    with client:
        state = client.health(timeout_s=timeout_s, audio_format=audio_format)
    if state.first_audio_s is None:
        print(f"healthy, without room for another utterance: answered after {state.total_s:.3f} s")
    else:
        print(f"healthy: first audio after {state.first_audio_s:.3f} s, all of it after {state.total_s:.3f} s")
    return OK


def _progress_bar(tokens: int | None, quiet: bool) -> tqdm[NoReturn]:
    return tqdm(
        total=None if tokens is None else tokens * SAMPLES_PER_TOKEN / SAMPLE_RATE,
        unit="s",
        desc="audio",
        bar_format=None if tokens is None else "{desc} {bar} {n:.1f}/{total:.1f} s [{elapsed}]",
        disable=True if quiet else None,  # None: off where standard error is no terminal
    )
