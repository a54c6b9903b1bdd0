"""Batches of streams that go through their utterances in step, in the stages of a model or in its
whole pipeline, and the times of their chunks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from benchmarks.gpu.settings import PROMPT_TOKENS, LeftOut, Row
from testkit.models.sized import a_voice
from token2wav import BackendError, Token2Wav, Voice
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.clocks import PipelineLoad
from token2wav.serving.utterance import Utterance
from token2wav.stages.stage import FrameChunk, TokenChunk

_LEAST_REPEATS = 3
_RESERVED_PAGES = 3  # pages that a stream reserves when it opens


def synchronize(device: torch.device) -> None:
    """Waits for all work that was launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class ChunkBatch(AbstractContextManager["ChunkBatch"]):
    """Batch of streams of random tokens in one voice; a context manager that closes the streams.

    Args:
        voice: voice of all streams, cached from the first batch on.

    Attributes:
        spoken_tokens: computed tokens of every stream.
        new_tokens: length of the latest chunk in the flow. A first chunk includes the rest of the
            prompt.
    """

    def __init__(self, model: Token2Wav, streams: int, voice: Voice) -> None:
        self.spoken_tokens = self.new_tokens = 0
        self._flow, self._vocoder = model.pipeline.flow, model.pipeline.vocoder
        self._config = model.config
        self._random = np.random.default_rng(0)
        self._prompt = len(voice.prompt_tokens)
        self._position = self._config.grid(self._prompt).prefix
        self._handles: list[tuple[int, int]] = []
        try:
            for _ in range(streams):
                self._handles.append((self._flow.open(voice), self._vocoder.open()))
        except BaseException:
            self.close()
            raise

    def advance(self, hop_tokens: int) -> tuple[float, float]:
        """Computes a chunk of every stream. Raises BackendError if the audio has NaN or infinite
        values, so its time says nothing.

        Returns:
            Seconds of the flow and of the vocoder, including their work on the device.
        """
        config = self._config
        prompt_tokens = self._prompt - self._position if not self.spoken_tokens else 0
        start, stop = self._position, self._position + prompt_tokens + hop_tokens
        count = stop - start + config.lookahead_tokens
        tokens = config.tokens.draw(count, self._random)
        chunk = TokenChunk(tokens, start, stop, last=False)
        began = time.perf_counter()
        mels = self._flow.advance([(handle, chunk) for handle, _ in self._handles])
        synchronize(mels[0].device)
        between = time.perf_counter()
        new = [mel[:, prompt_tokens * config.token_mel_ratio :] for mel in mels]
        handles = [vocoder_handle for _, vocoder_handle in self._handles]
        frames = [FrameChunk(mel, False) for mel in new]
        audio = self._vocoder.advance(list(zip(handles, frames, strict=True)))
        synchronize(audio[0].device)
        ended = time.perf_counter()
        if not torch.cat(audio).isfinite().all():
            raise BackendError("backend: the model produced NaN or infinite audio")
        self._position, self.new_tokens = stop, stop - start
        self.spoken_tokens += hop_tokens
        return between - began, ended - between

    def close(self) -> None:
        for flow_handle, vocoder_handle in self._handles:
            self._flow.close(flow_handle)
            self._vocoder.close(vocoder_handle)
        self._handles.clear()

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def requests_in(model: Token2Wav, voice: Voice, streams: int) -> Iterator[list[Utterance]]:
    """Opens requests in one voice, each of which may begin with a provisional chunk."""
    pipeline, requests = model.pipeline, list[Utterance]()
    try:
        for _ in range(streams):
            pipeline.load = PipelineLoad()  # alone in a load, every request is admitted
            requests.append(pipeline.utterance(voice))
            pipeline.open(requests[-1])
        yield requests
    finally:
        for request in requests:
            pipeline.close(request)


def push_first(model: Token2Wav, requests: Sequence[Utterance]) -> int:
    """Pushes as many random tokens as the first chunk of requests needs, and returns the number."""
    random, count = np.random.default_rng(0), 0
    while any(request.chunker.next_chunk is None for request in requests):
        token, count = model.config.tokens.draw(1, random), count + 1
        for request in requests:
            request.chunker.push(token)
    return count


def next_audio(model: Token2Wav, requests: Sequence[Utterance]) -> AudioChunk | None:
    """Computes the next chunks of requests in one batch, and returns the audio of the first one."""
    results = model.pipeline.advance(requests)
    for request, result in zip(requests, results, strict=True):
        request.chunker.finish_chunk()
        if isinstance(result, Exception):
            raise result
    return results[0]  # type: ignore[return-value]


def spread_ms(seconds: Sequence[float]) -> list[float]:
    """Returns the median, the least and the most of times, in ms."""
    times = 1000 * np.array(seconds)
    return [round(float(value), 3) for value in (np.median(times), times.min(), times.max())]


def chunk_key(streams: int, hop: int, spoken_s: float, storage: str = "auto") -> str:
    """Returns the row key of a batch's chunks, with the storage type of their pages."""
    pages = "" if storage == "auto" else f", {storage} pages"
    return f"{streams} streams, {hop} tokens after {spoken_s:g} s{pages}"


def chunk(
    model: Token2Wav,
    repeats: int,
    streams: int,
    hop: int,
    spoken_s: float,
    repeat_s: float = float("inf"),
) -> Row:
    """Times a chunk of each stream in one batch: median, least and most, in ms.

    The row has these times for the flow, for the vocoder and for both together. The first chunk
    warms up and does not count.

    Args:
        hop: new tokens of the timed chunk.
        spoken_s: seconds of audio before the timed chunk.
        repeat_s: seconds after which no further repeat begins, if there are three. A repeat
            computes the audio before its chunk too.
    """
    times, computed, began = [], 0, time.monotonic()
    for repeat in range(repeats + 1):
        if repeat > _LEAST_REPEATS and time.monotonic() - began > repeat_s:
            break
        with spoken(model, streams, round(25 * spoken_s), hop) as batch:
            times.append(batch.advance(hop))
            computed = batch.new_tokens
    flow, vocoder = (np.array(seconds) for seconds in zip(*times[1:], strict=True))
    history_s = spoken_s + PROMPT_TOKENS / 25 if spoken_s else 0.0
    row: Row = {"streams": streams, "hop_tokens": hop, "spoken_s": spoken_s, "history_s": history_s}
    row["repeats"] = len(flow)
    for name, column in (("flow_ms", flow), ("vocoder_ms", vocoder), ("total_ms", flow + vocoder)):
        row[name] = spread_ms(column.tolist())
    return row | {"computed_tokens": computed}


@contextmanager
def spoken(model: Token2Wav, streams: int, tokens: int, hop: int) -> Iterator[ChunkBatch]:
    """Opens streams and computes `tokens` tokens of each.

    A stream that finds no free page continues by recomputing, which would be another measurement.
    Therefore the streams must all stay in the cache, also after one more hop. Raises LeftOut if the
    cache is too small for all streams.
    """
    usage, config = model.pipeline.flow.usage(), model.config
    prefix, block = config.grid(PROMPT_TOKENS).prefix, config.block_tokens
    stream_pages = -(-(PROMPT_TOKENS - prefix + tokens + hop) // block)
    needed = prefix // block + streams * max(_RESERVED_PAGES, stream_pages)
    if usage.capacity and needed > usage.capacity:
        raise LeftOut(
            f"the batch needs {needed} pages of {usage.page_bytes / 1000000.0:.1f} MB, but the "
            f"cache has {usage.capacity}"
        )
    with ChunkBatch(model, streams, a_voice(config)) as batch:
        while batch.spoken_tokens < tokens:
            batch.advance(min(100, tokens - batch.spoken_tokens) if batch.spoken_tokens else 25)
        yield batch
