"""What the subcommands do, once their arguments are understood."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import NoReturn, Protocol

from tqdm import tqdm

from token2wav_client.audio import SAMPLE_RATE, SAMPLES_PER_TOKEN, AudioArray, AudioFormat
from token2wav_client.client import Client
from token2wav_client.errors import OK, OutputError, VoiceError
from token2wav_client.pcm import PcmFormat, PcmWriter
from token2wav_client.player import Player
from token2wav_client.report import as_json, as_table, tell
from token2wav_client.stats import ChunkTiming, summarize
from token2wav_client.token_source import batches, open_tokens, paced
from token2wav_client.voice import ClientVoice, is_voice_id
from token2wav_client.writer import Subtype, WavWriter

STANDARD_OUTPUT = "-"


class Sink(Protocol):
    """Where audio goes."""

    samples: int

    def write(self, audio: AudioArray, sample_rate: int) -> None:
        """Take samples, shape (samples,), of which a second has `sample_rate`."""


def synth(
    client: Client,
    *,
    tokens: str,
    codebooks: int,
    voice: str | None,
    voice_id: str | None,
    voice_name: str | None,
    out: str | None,
    play: bool,
    tokens_per_second: float,
    tokens_per_request: int,
    audio_format: AudioFormat,
    steps: int | None,
    subtype: Subtype,
    pcm_format: PcmFormat | None,
    report_json: bool,
    quiet: bool,
) -> int:
    """Speak one utterance into a WAV file, a pipe or a loudspeaker, and report; closes the client.

    Raises:
        ClientError: anything that went wrong; audio received before that is kept, and said to be.
    """
    with client, ExitStack() as stack:
        speaker = _speaker(voice, voice_id, voice_name)
        sinks: list[Sink] = []
        if out is not None:
            sinks.append(_sink(out, subtype, pcm_format))
        if play:
            sinks.append(stack.enter_context(Player(audio_format)))
        source = open_tokens(tokens, codebooks)
        pieces = batches(source.pieces, tokens_per_request)
        if tokens_per_second:
            pieces = paced(pieces, tokens_per_second)
        timings: list[ChunkTiming] = []
        try:
            with _progress_bar(source.count, quiet) as bar:
                for chunk in client.synthesize(pieces, speaker, audio_format=audio_format, steps=steps):
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
    if report_json:
        tell(as_json(stats), report_to)
    elif not quiet:
        tell(as_table(stats), report_to)
    return OK


def _speaker(file: str | None, voice_id: str | None, name: str | None) -> ClientVoice | str:
    if file is not None:
        return ClientVoice.load(file)
    if voice_id is not None and not is_voice_id(voice_id):
        raise VoiceError(f"voice id: {voice_id!r} is not 64 hexadecimal digits")
    if not (known := voice_id or name):
        raise VoiceError("voice: neither a file nor an id or a name was given")
    return known


def _sink(out: str, subtype: Subtype, pcm_format: PcmFormat | None) -> Sink:
    if out == STANDARD_OUTPUT:
        return PcmWriter(pcm_format or "s16le")
    if pcm_format is not None:
        raise OutputError("format: is for --out - alone; a WAV file has a --subtype")
    return WavWriter(out, subtype)


def voice_id(path: str) -> int:
    """Print the id of a voice file.

    Raises:
        VoiceError: it cannot be read.
    """
    tell(ClientVoice.load(path).id)
    return OK


def health(client: Client, *, timeout_s: float, audio_format: AudioFormat) -> int:
    """Speak three tokens and print in one line how long it took; closes the client.

    Raises:
        ClientError: the server does not work; the class says in which way.
    """
    with client:
        state = client.health(timeout_s=timeout_s, audio_format=audio_format)
    if state.first_audio_s is None:
        tell(f"healthy, without room for another utterance: answered after {state.total_s:.3f} s")
    else:
        tell(f"healthy: first audio after {state.first_audio_s:.3f} s, all of it after {state.total_s:.3f} s")
    return OK


def _progress_bar(tokens: int | None, quiet: bool) -> tqdm[NoReturn]:
    return tqdm(
        total=None if tokens is None else tokens * SAMPLES_PER_TOKEN / SAMPLE_RATE,
        unit="s",
        desc="audio",
        bar_format=None if tokens is None else "{desc} {bar} {n:.1f}/{total:.1f} s [{elapsed}]",
        disable=True if quiet else None,  # None: off where standard error is no terminal
    )
