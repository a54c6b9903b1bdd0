"""CosyVoice2 in the library: planned memory, early audio, and blocks of the settings.

`test_public_mels.py` compares its mel with the public code. `test_streams.py` tests its streams.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from testkit.batches import WHOLE_BLOCKS
from testkit.models.yaml_edits import edit_text
from testkit.utterances import a_voice, joined, off, portions, some_tokens, streamed_mels
from tests.families.cosyvoice2.conftest import CPU
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.errors import ConfigError
from token2wav.families.cosyvoice2 import read
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav_server.plan_memory import stream_needs

MEL = 2e-5  # tolerance between float32 results with values up to 5
AUDIO = 1e-4


def test_planned_memory_equals_the_memory_of_a_stream(folder: Path) -> None:
    voice, model = a_voice(60), Token2Wav.load(folder, runtime=CPU)
    flow, most = model.pipeline.flow, 0
    handle = flow.open(voice)
    schedule = HopSchedule.of(StreamConfig(), model.config)
    chunker = Chunker(voice.prompt_tokens, model.config, schedule)
    chunker.push(some_tokens(130), end=True)
    while (chunk := chunker.next_chunk) is not None:
        flow.advance([(handle, chunk)])
        chunker.finish_chunk()
        most = max(most, flow.usage().used - flow.usage().shared)
    needs = stream_needs(model.config, StreamConfig(), "float32", 60, 130)
    assert (needs.page_bytes, needs.prompt_pages) == (flow.usage().page_bytes, flow.usage().shared)
    assert abs(needs.pages - most) <= 2  # the formula assumes other hops
    flow.close(handle)


def test_early_audio(folder: Path, model: Token2Wav) -> None:
    extrapolating = Token2Wav.load(folder, stream=StreamConfig(lookahead_frames=8), runtime=CPU)
    voice, tokens = a_voice(0), some_tokens(60)
    with extrapolating.stream(voice) as stream:
        [first] = stream.push(tokens)
        audio = joined([first, *stream.finish()])
    assert len(first.audio) == (50 - 8) * 480
    whole = model.synthesize(tokens, voice)
    exact = (50 - 21) * 480
    assert off(audio[:exact], whole[:exact]) <= AUDIO
    assert off(audio[len(first.audio) :], whole[len(first.audio) :]) <= AUDIO


def with_chunks(folder: Path, target: Path, old: str, new: str) -> Path:
    """Copies a model folder, with one change of its model file."""
    edit_text(Path(shutil.copytree(folder, target)) / "cosyvoice2.yaml", (old, new))
    return target


@pytest.fixture
def dynamic(folder: Path, tmp_path: Path) -> Path:
    """Folder of a model that was trained on dynamic chunks."""
    key = "        macaron_style: False\n"
    changed = f"{key}        use_dynamic_chunk: True\n"
    return with_chunks(folder, tmp_path / "dynamic", key, changed)


@pytest.mark.parametrize("block", [1, 10, 50])
def test_blocks_of_the_settings(
    block: int, folder: Path, dynamic: Path, model: Token2Wav, tmp_path: Path
) -> None:
    """They are the blocks of a model whose file has them, in the whole, in streams and batches."""
    edited = with_chunks(folder, tmp_path / "edited", "chunk_size: 25", f"chunk_size: {block}")
    expected = Token2Wav.load(edited, stream=WHOLE_BLOCKS, runtime=CPU)
    chosen = Token2Wav.load(dynamic, stream=replace(WHOLE_BLOCKS, block_tokens=block), runtime=CPU)
    assert chosen.config == replace(read(edited), block_choices=())
    voice, tokens = a_voice(41), some_tokens(93)
    whole = chosen.mel(tokens, voice)
    assert off(whole, expected.mel(tokens, voice)) == 0
    assert off(whole, model.mel(tokens, voice)) > 100 * MEL
    utterances = (tokens, voice), (some_tokens(60), a_voice(0))
    for (its_tokens, its_voice), mel in zip(
        utterances, streamed_mels(chosen, *utterances), strict=True
    ):
        assert off(mel, chosen.mel(its_tokens, its_voice)) <= MEL
    with chosen.stream(voice) as stream:
        chunks = [chunk for part in portions(tokens, [7, 30]) for chunk in stream.push(part)]
        audio = joined([*chunks, *stream.finish()])
    assert off(audio, chosen.synthesize(tokens, voice)) <= AUDIO


@pytest.mark.parametrize("stream", [StreamConfig(), StreamConfig(lookahead_frames=8)])
def test_early_audio_with_blocks_of_the_settings(
    stream: StreamConfig, folder: Path, dynamic: Path, tmp_path: Path
) -> None:
    """Provisional chunks equal those of a model whose file has these blocks."""
    edited = with_chunks(folder, tmp_path / "edited", "chunk_size: 25", "chunk_size: 10")
    chunks = []
    for path, its_stream in ((edited, stream), (dynamic, replace(stream, block_tokens=10))):
        model = Token2Wav.load(path, stream=its_stream, runtime=CPU)
        with model.stream(a_voice(41)) as opened:
            pushed = [
                chunk for part in portions(some_tokens(93), [7]) for chunk in opened.push(part)
            ]
            chunks.append([*pushed, *opened.finish()])
    expected, chosen = chunks
    assert [len(chunk.audio) for chunk in chosen] == [len(chunk.audio) for chunk in expected]
    assert off(joined(chosen), joined(expected)) == 0


def test_no_graph_is_exported_for_blocks_of_the_settings(dynamic: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"runtime\.backend: onnx cannot run stream\.block_tokens; set torch"
    ):
        Token2Wav.load(
            dynamic, stream=StreamConfig(block_tokens=10), runtime=RuntimeConfig(backend="onnx")
        )
