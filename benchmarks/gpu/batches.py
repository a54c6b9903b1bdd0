"""Batches through flow and vocoder as they are served, against each stream alone on torch in float32 without graphs.

Streams of a batch have prompts and chunks of different length, and end with a chunk that is no whole block. The
vocoders get the same mels, because from mel to audio errors of F0 add up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.buckets import BOUNDS, worst
from benchmarks.gpu.chunks import load
from benchmarks.gpu.settings import Settings
from token2wav import RuntimeConfig, Token2Wav, Voice
from token2wav.engines.base import FlowChunk, MelChunk
from token2wav.engines.cuda_graphs import SWITCH
from token2wav.flow.cache import CacheLayout
from token2wav.model_config import ModelConfig
from token2wav.streaming.accumulator import TokenAccumulator
from token2wav_export.verify import BOUNDS as VERIFY_BOUNDS

AUDIO = VERIFY_BOUNDS["float32"]["vocoder_max"]
_PROMPTS = (75, 30, 0)  # tokens
_HOPS = (25, 50, 100)
_TAIL_TOKENS = 7
_PAGES = 16  # that one stream has room in


@dataclass(frozen=True, eq=False)
class Plan:
    """One utterance.

    Attributes:
        voice: of it.
        chunks: all of them.
        prompt_frames: at the start of the first chunk's mel.
    """

    voice: Voice
    chunks: list[FlowChunk]
    prompt_frames: int


@dataclass(frozen=True, eq=False)
class Spoken:
    """What became of one: the mel (bands, frames) of every chunk, without the prompt's, and all audio (samples,)."""

    mels: list[torch.Tensor]
    audio: torch.Tensor


def check_batches(folder: Path, settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for every batch size: the largest errors of mel (relative) and audio (absolute) of any of its streams."""
    config = ModelConfig.read(folder)
    plans = [plan(config, index) for index in range(max(settings.parity_batches))]
    alone = load_reference(folder, settings, config)
    expected = [speak(alone, [each])[0] for each in plans]
    model = load(folder, settings)
    capacity = model.pipeline.flow.usage().capacity
    for streams in settings.parity_batches:
        row = {"streams": streams, "engine": model.engine.name, "precision": model.engine.precision}
        if 0 < capacity < streams * _PAGES:
            yield row | {"mel": None, "audio": None, "problem": None, "note": f"not run: {capacity} pages are too few"}
        else:
            yield row | compared(speak(model, plans[:streams], expected), expected, BOUNDS[model.engine.precision])


def compared(spoken: Sequence[Spoken], expected: Sequence[Spoken], bound: float) -> dict[str, Any]:
    """The largest errors, and what is beyond its bound; that of the mel is given."""
    pairs = list(zip(spoken, expected, strict=False))
    mel = worst((torch.cat(one.mels, dim=1), torch.cat(other.mels, dim=1)) for one, other in pairs)
    audio = float(np.max([float((one.audio - other.audio).abs().max()) for one, other in pairs]))
    problems = [f"mel {mel:.1e}, at most {bound:.1e}"] if not mel <= bound else []
    problems += [f"audio {audio:.1e}, at most {AUDIO:.1e}"] if not audio <= AUDIO else []
    note = "; ".join(problems)
    return {"mel": mel, "audio": audio, "problem": note or None, "note": note or "within all bounds"}


def load_reference(folder: Path, settings: Settings, config: ModelConfig) -> Token2Wav:
    """Torch in float32, chunk by chunk, with a cache for one stream."""
    pages = _PAGES * CacheLayout.of(config.flow, "float32").page_bytes
    runtime = RuntimeConfig(settings.device, "torch", precision="float32", cache_mib=1 + (pages >> 20))
    before = os.environ.get(SWITCH, "1")
    os.environ[SWITCH] = "0"
    try:
        return Token2Wav.load(folder, runtime=runtime)
    finally:
        os.environ[SWITCH] = before


def plan(config: ModelConfig, index: int) -> Plan:
    """The utterance of one stream of a batch; all have as many chunks."""
    flow, random = config.flow, np.random.default_rng(index)
    prompt = _PROMPTS[index % len(_PROMPTS)]
    voice = Voice(
        random.integers(0, flow.vocab_size, prompt),
        random.standard_normal((flow.token_mel_ratio * prompt, flow.mel_bands)),
        random.standard_normal(flow.spk_embed_dim),
    )
    first = -(-prompt // flow.block_tokens) * flow.block_tokens + _HOPS[0]
    turn = index % len(_HOPS)
    stops = [first, *(first + int(sum((_HOPS * 2)[turn : turn + count])) for count in (1, 2, 3))]
    stops.append(stops[-1] + _TAIL_TOKENS)
    tokens = TokenAccumulator(voice.prompt_tokens, flow)
    tokens.append(random.integers(0, flow.vocab_size, stops[-1] - prompt).astype(np.int32))
    start = flow.prefix_tokens(prompt)
    chunks = [
        tokens.window(begin, end, last=end == stops[-1]) for begin, end in zip([start, *stops], stops, strict=False)
    ]
    return Plan(voice, chunks, flow.token_mel_ratio * (prompt - start))


def speak(model: Token2Wav, plans: Sequence[Plan], given: Sequence[Spoken] | None = None) -> list[Spoken]:
    """Takes utterances through the engines in one batch.

    Args:
        model: whose engines.
        plans: the utterances.
        given: whose mels the vocoder gets; by default those that the flow makes.
    """
    flow, vocoder = model.pipeline.flow, model.pipeline.vocoder
    handles = [(flow.open(each.voice), vocoder.open()) for each in plans]
    mels: list[list[torch.Tensor]] = [[] for _ in plans]
    audio: list[list[torch.Tensor]] = [[] for _ in plans]
    for number in range(len(plans[0].chunks)):
        made = flow.advance([(handle, each.chunks[number]) for (handle, _), each in zip(handles, plans, strict=True)])
        for own, mel, each in zip(mels, made, plans, strict=True):
            own.append(mel[:, 0 if number else each.prompt_frames :])
        heard = [each.mels for each in given[: len(plans)]] if given else mels
        last = number == len(plans[0].chunks) - 1
        samples = vocoder.advance(
            [(handle, MelChunk(own[number], last)) for (_, handle), own in zip(handles, heard, strict=True)]
        )
        for pieces, piece in zip(audio, samples, strict=True):
            pieces.append(piece)
    for flow_handle, vocoder_handle in handles:
        flow.close(flow_handle)
        vocoder.close(vocoder_handle)
    return [Spoken(own, torch.cat(pieces)) for own, pieces in zip(mels, audio, strict=True)]
