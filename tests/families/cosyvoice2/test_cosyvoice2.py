"""CosyVoice2 in the library equals public code: streamed, batched, windowed, with a full cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.families.cosyvoice2.conftest import CPU
from tests.support.cosyvoice2_model import golden_voice, write_model
from tests.support.family_golden import FamilyGolden
from tests.support.golden import snr_db
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.execution.stages import TokenChunk
from token2wav_server.plan_memory import stream_needs

Utterance = tuple[NDArray[np.int32], Voice]

MEL = 2e-5  # tolerance between float32 results, whose values reach 5
AUDIO = 1e-4
SNR_DB = 40  # end to end, because F0 turns rounding of the mel into phase


def off(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max())


def streamed(
    model: Token2Wav, portions: Sequence[NDArray[np.int32]], voice: Voice
) -> NDArray[np.float32]:
    with model.stream(voice) as stream:
        chunks = [chunk for tokens in portions for chunk in stream.push(tokens)] + stream.finish()
    return np.concatenate([chunk.audio for chunk in chunks])


def chunks_of(tokens: NDArray[np.int32], voice: Voice, hop: int = 50) -> list[TokenChunk]:
    """Lists the chunks of an utterance whose tokens have all arrived.

    The first chunk ends one block after the last block of the prompt.
    """
    spoken, prompt = np.concatenate((voice.prompt_tokens, tokens)), len(voice.prompt_tokens)
    start, stop, chunks = max(0, prompt - 3) // 25 * 25, -(-prompt // 25) * 25 + 25, []
    while stop + 3 <= len(spoken):
        left = min(2, start)
        chunks.append(TokenChunk(spoken[start - left : stop + 3], left, start, stop, last=False))
        start, stop = stop, stop + hop
    left = min(2, start)
    return [*chunks, TokenChunk(spoken[start - left :], left, start, len(spoken), last=True)]


def streamed_mels(model: Token2Wav, utterances: Sequence[Utterance]) -> list[NDArray[np.float32]]:
    """Returns the mels of utterances with chunks that run in one batch."""
    flow, mels = model.pipeline.flow, list[list[NDArray[np.float32]]]([] for _ in utterances)
    handles = [flow.open(voice) for _, voice in utterances]
    rounds = itertools.zip_longest(*(chunks_of(*utterance) for utterance in utterances))
    for chunks in rounds:
        running = [index for index, chunk in enumerate(chunks) if chunk is not None]
        for index, mel in zip(
            running, flow.advance([(handles[at], chunks[at]) for at in running]), strict=True
        ):
            mels[index].append(mel.numpy())
    for handle in handles:
        flow.close(handle)
    wholes = (np.concatenate(parts, axis=1) for parts in mels)
    return [mel[:, -2 * len(tokens) :] for mel, (tokens, _) in zip(wholes, utterances, strict=True)]


def streamed_mel(model: Token2Wav, tokens: NDArray[np.int32], voice: Voice) -> NDArray[np.float32]:
    [mel] = streamed_mels(model, [(tokens, voice)])
    return mel


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_public_mel(size: str, tmp_path: Path) -> None:
    golden = FamilyGolden("cosyvoice2", size)
    model = Token2Wav.load(write_model(tmp_path, golden), runtime=CPU)
    tokens, voice = golden["token"].numpy(), golden_voice(golden)
    assert off(model.mel(tokens, voice), golden["mel_streaming"].numpy()) <= MEL
    assert off(model.mel(tokens, voice, streaming=False), golden["mel_full"].numpy()) <= MEL
    mel, chunk = streamed_mel(model, tokens, voice), golden["mel_chunk"].numpy()
    assert off(mel, golden["mel_streaming"].numpy()) <= MEL
    assert off(mel[:, : chunk.shape[1]], chunk) <= MEL


@pytest.mark.parametrize(("prompt", "count"), [(0, 1), (0, 53), (1, 25), (30, 28), (75, 130)])
def test_a_streamed_mel_is_that_of_the_whole(model: Token2Wav, prompt: int, count: int) -> None:
    voice, tokens = a_voice(prompt), some_tokens(count)
    assert off(streamed_mel(model, tokens, voice), model.mel(tokens, voice)) <= MEL


def test_portions_do_not_matter(model: Token2Wav) -> None:
    voice, tokens = a_voice(30), some_tokens(130)
    whole = model.synthesize(tokens, voice)
    assert len(whole) == 960 * len(tokens)
    for seed in range(2):
        cuts = np.sort(np.random.default_rng(seed).integers(0, len(tokens), 9))
        assert off(streamed(model, np.split(tokens, cuts), voice), whole) <= AUDIO
    assert snr_db(whole, model.vocode(model.mel(tokens, voice))) > SNR_DB


def test_batched_is_alone(model: Token2Wav) -> None:
    utterances = [
        (some_tokens(count), a_voice(prompt))
        for prompt, count in ((0, 60), (30, 90), (30, 41), (75, 110))
    ]
    for utterance, mel in zip(utterances, streamed_mels(model, utterances), strict=True):
        assert off(mel, streamed_mel(model, *utterance)) <= MEL


def test_prompts_are_shared(model: Token2Wav) -> None:
    flow, voice = model.pipeline.flow, a_voice(75, seed=5)
    hits = flow.usage().prompt_hits
    with model.stream(voice), model.stream(voice):
        assert flow.usage().prompt_hits == hits + 1
    assert model.pipeline.open_streams == 0


def test_a_full_cache(folder: Path, model: Token2Wav) -> None:
    """A stream without room in the cache continues by recomputing, with the same result."""
    voice, tokens = a_voice(30), some_tokens(150)
    pages = 5 * model.pipeline.flow.usage().page_bytes
    model = Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu", cache_mib=-(-pages >> 20)))
    assert off(streamed_mel(model, tokens, voice), model.mel(tokens, voice)) <= MEL
    assert model.pipeline.flow.usage().used == model.pipeline.flow.usage().shared


def test_windows(folder: Path) -> None:
    """A window limits attention and memory, with the same result from cache and recomputing."""
    voice, tokens = a_voice(30), some_tokens(130)
    model = Token2Wav.load(folder, stream=StreamConfig(left_blocks=1), runtime=CPU)
    mel = streamed_mel(model, tokens, voice)
    assert off(mel, model.mel(tokens, voice)) <= MEL
    assert off(mel, Token2Wav.load(folder, runtime=CPU).mel(tokens, voice)) > 0.01


def test_planned_memory_is_what_a_stream_takes(folder: Path) -> None:
    voice, tokens = a_voice(60), some_tokens(130)
    model = Token2Wav.load(folder, runtime=CPU)
    flow, chunks, most = model.pipeline.flow, chunks_of(tokens, voice), 0
    handle = flow.open(voice)
    for chunk in chunks:
        flow.advance([(handle, chunk)])
        most = max(most, flow.usage().used - flow.usage().shared)
    needs = stream_needs(model.config, StreamConfig(), "float32", 60, 130)
    assert (needs.page_bytes, needs.prompt_pages) == (flow.usage().page_bytes, flow.usage().shared)
    assert abs(needs.pages - most) <= 2  # the formula assumes other hops
    flow.close(handle)


def test_early_audio(folder: Path, model: Token2Wav) -> None:
    early = Token2Wav.load(folder, stream=StreamConfig(hold_frames=8), runtime=CPU)
    voice, tokens = a_voice(0), some_tokens(60)
    with early.stream(voice) as stream:
        [first] = stream.push(tokens)
        rest = stream.finish()
    assert len(first.audio) == (50 - 8) * 480
    audio = np.concatenate([first.audio, *(chunk.audio for chunk in rest)])
    whole = model.synthesize(tokens, voice)
    exact = (50 - 21) * 480
    assert off(audio[:exact], whole[:exact]) <= AUDIO
    assert off(audio[len(first.audio) :], whole[len(first.audio) :]) <= AUDIO


def a_voice(prompt: int, seed: int = 1) -> Voice:
    random = np.random.default_rng(seed)
    tokens, mel = random.integers(0, 6561, prompt), random.standard_normal((2 * prompt, 80))
    return Voice(tokens, mel.astype(np.float32), random.standard_normal(192).astype(np.float32))


def some_tokens(count: int) -> NDArray[np.int32]:
    return np.random.default_rng(count).integers(0, 6561, count).astype(np.int32)
