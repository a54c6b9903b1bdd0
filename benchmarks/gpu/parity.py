"""Section parity: batches as they are served against each stream alone, in float32 without graphs.

The reference engine is torch. Streams of a batch have prompts and chunks of different length, and
end with a chunk that is no whole block. The longest chunks of their rounds have 1, 2, 4 and 5
blocks. Together with the batch sizes, these lengths run nearly all captured shapes. The vocoders
get the same mels, because errors of F0 add up from mel to audio.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.chunks import load
from benchmarks.gpu.settings import SETTINGS, LeftOut, Row, Rows, Settings
from testkit.models.sized import a_voice
from token2wav import StreamConfig, Token2Wav, Voice
from token2wav.assembly import flow_networks
from token2wav.config.model_config import ModelConfig
from token2wav.execution.cuda_graphs import SWITCH
from token2wav.published.registry import read_config
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav.stages.stage import FrameChunk

# Bounds of `token2wav export verify`. The bound of the mel is a ratio: the root mean square of the
# error relative to the spread of the mel. The bound of the audio is for vocoders with the same mel.
MEL = {"float32": 10 ** (-90 / 20), "float16": 10 ** (-45 / 20)}
# Bound of the mel with float8 storage, of which docs/tuning.md gives an error of 7e-3.
_FLOAT8_MEL = 10 ** (-35 / 20)
AUDIO = 1e-3
# Tokens of prompts and of utterances. Every prompt length occurs with every utterance length.
_PROMPTS, _LENGTHS = (75, 30, 0), (302, 126, 130, 157)
_BLOCKS = (1, 2, 4)
_REFERENCE_BLOCKS = 8
_PAGES = 20  # room for one stream
# Streams k and k + 13 are equal. 13 is no power of two: swapped rows differ by powers of two.
_UTTERANCES = 13


@dataclass(frozen=True)
class _Rounds(HopSchedule):
    """Schedule of chunks of 1, 2 and 4 blocks, and of fewer blocks in other turns."""

    turn: int = 0

    def hop(self, index: int) -> int:
        longest = min(index, len(_BLOCKS)) - 1
        return self.block * _BLOCKS[longest - self.turn % (longest + 1)]


class Utterance(NamedTuple):
    """Tokens in a voice, the turn of their rounds, and after computation mel and audio.

    The mel has the shape (bands, frames).
    """

    voice: Voice
    tokens: NDArray[np.int64]
    turn: int
    mel: torch.Tensor
    audio: torch.Tensor


def parity(folder: Path, settings: Settings) -> Rows:
    """Measures the largest errors of mel (relative) and audio (absolute) in a batch.

    Each batch size has a row.
    """
    _, storage = SETTINGS[settings.setting]
    expected = reference(folder, settings, min(_UTTERANCES, max(settings.parity_batches)))
    model, _ = load(folder, settings, _stream(settings), cache_storage=storage)
    bound = MEL["float16" if storage == "int8" else model.summary.precision]
    if storage == "float8":
        bound = _FLOAT8_MEL
    for streams in settings.parity_batches:
        yield parity_key(settings, streams), partial(check, model, streams, expected, bound)


def reference(folder: Path, settings: Settings, count: int) -> list[Utterance]:
    """Computes the first utterances, each alone, on torch in float32 without CUDA graphs.

    The chunks are long, because the host needs a quarter of a second for a chunk without graphs.
    """
    config = read_config(folder)
    with torch.device("meta"):
        page_bytes = flow_networks(config, "float32").layout.page_bytes
    mib = 1 + (_PAGES * page_bytes >> 20)
    runtime = settings.runtime(precision="float32", cache_mib=mib)
    with patch.dict(os.environ, {SWITCH: "0"}):
        alone = Token2Wav.load(folder, stream=_stream(settings), runtime=runtime)
    block = config.block_tokens
    long = HopSchedule(_REFERENCE_BLOCKS * block, _REFERENCE_BLOCKS * block, block)
    return [speak(alone, [utterance(config, index)], long)[0] for index in range(count)]


def _stream(settings: Settings) -> StreamConfig:
    """Returns settings of streams with the default hop, which runs more captured shapes."""
    stream, _ = SETTINGS[settings.setting]
    return StreamConfig(first_tokens=0, left_blocks=stream.left_blocks)


def parity_key(settings: Settings, streams: int) -> str:
    return f"{settings.setting}, {settings.precision}, {streams} streams"


def utterance(config: ModelConfig, index: int) -> Utterance:
    """Returns the utterance of one stream of a batch, with mel and audio still empty."""
    prompt, length = _PROMPTS[index % len(_PROMPTS)], _LENGTHS[index % len(_LENGTHS)]
    tokens = config.tokens.draw(length, np.random.default_rng(index))
    return Utterance(
        a_voice(config, index, prompt), tokens, index // 2, torch.empty(0), torch.empty(0)
    )


def check(model: Token2Wav, streams: int, expected: Sequence[Utterance], bound: float) -> Row:
    """Compares one batch with the reference; `problem` of the row lists errors beyond their bounds.

    Args:
        streams: size of the batch.
        bound: largest error of the mel.
    """
    references = [expected[index % len(expected)] for index in range(streams)]
    block, capacity = model.config.block_tokens, model.pipeline.flow.usage().capacity
    # Streams share the whole blocks of their prompts.
    needed = sum(2 + len(target.tokens) // block for target in references) + 2 * len(expected)
    if 0 < capacity < needed:
        raise LeftOut(f"the batch needs {needed} pages, but the cache has {capacity}")
    pairs = list(zip(speak(model, references), references, strict=True))
    errors = [
        float((result.mel - target.mel).square().mean().sqrt() / target.mel.std())
        for result, target in pairs
    ]
    mel = float(np.max(errors))  # NaN stays NaN
    audio = float(
        np.max([float((result.audio - target.audio).abs().max()) for result, target in pairs])
    )
    problems = [f"mel {mel:.1e}, at most {bound:.1e}"] if not mel <= bound else []
    problems += [f"audio {audio:.1e}, at most {AUDIO:.1e}"] if not audio <= AUDIO else []
    return {"mel": mel, "mel_bound": bound, "audio": audio, "problem": "; ".join(problems) or None}


def speak(
    model: Token2Wav, utterances: Sequence[Utterance], schedule: HopSchedule | None = None
) -> list[Utterance]:
    """Computes utterances in one batch.

    The vocoder gets the mels of the utterances if they are known, and the new mels otherwise.

    Args:
        utterances: utterances, with or without their mels.
        schedule: schedule of the chunks; None for the rounds of each utterance.
    """
    flow, vocoder, config = model.pipeline.flow, model.pipeline.vocoder, model.config
    block, ratio = config.block_tokens, config.token_mel_ratio
    chunkers: list[Chunker] = []
    mels = [torch.empty(0)] * len(utterances)
    audio = mels.copy()
    handles = [
        (flow.open(utterance.voice), vocoder.open(utterance.voice)) for utterance in utterances
    ]
    for utterance in utterances:
        hops = schedule or _Rounds(block, block, block, turn=utterance.turn)
        chunkers.append(chunker := Chunker(utterance.voice.prompt_tokens, config, hops))
        chunker.push(utterance.tokens.astype(np.int32), end=True)
    while ready := [
        (index, chunk) for index, chunker in enumerate(chunkers) if (chunk := chunker.next_chunk)
    ]:
        chunk_mels = flow.advance([(handles[index][0], chunk) for index, chunk in ready])
        batch = []
        for (index, chunk), mel in zip(ready, chunk_mels, strict=True):
            known = utterances[index].mel
            new = mel[:, ratio * max(0, chunkers[index].prompt_tokens - chunk.start) :]
            mels[index] = torch.cat((mels[index].to(new.device), new), dim=-1)
            end = mels[index].shape[1]
            heard = known[:, end - new.shape[1] : end] if known.numel() else new
            batch.append((handles[index][1], FrameChunk(heard, chunk.last)))
            chunkers[index].finish_chunk()
        for (index, _), samples in zip(ready, vocoder.advance(batch), strict=True):
            audio[index] = torch.cat((audio[index].to(samples.device), samples))
    for flow_handle, vocoder_handle in handles:
        flow.close(flow_handle)
        vocoder.close(vocoder_handle)
    return [
        utterance._replace(mel=mels[index], audio=audio[index])
        for index, utterance in enumerate(utterances)
    ]
