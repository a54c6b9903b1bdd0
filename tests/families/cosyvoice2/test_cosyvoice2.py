"""CosyVoice2 and MOSS-Speech: their model files, planned memory, early audio, and blocks of the
settings.

`test_public_mels.py` compares its mel with the public code. `test_streams.py` tests its streams.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from testkit.batches import WHOLE_BLOCKS
from testkit.models.cosyvoice2_model import write_moss_speech_yaml, write_yaml
from testkit.models.folders import CPU, golden_of, write_folder
from testkit.models.yaml_edits import edit_text
from testkit.utterances import a_voice, joined, off, portions, some_tokens, streamed_mels
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.errors import CheckpointError, ConfigError
from token2wav.families.cosyvoice2 import read
from token2wav.published.checkpoint_files import weights_file
from token2wav.published.registry import read_config
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav_server.plan_memory import stream_needs

TINY = golden_of("cosyvoice2")
MEL = 2e-5  # tolerance between float32 results with values up to 5
AUDIO = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return write_folder("cosyvoice2", tmp_path_factory.mktemp("cosyvoice2"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Token2Wav:
    return Token2Wav.load(folder, stream=WHOLE_BLOCKS, runtime=CPU)


def test_files_of_the_first_release(tmp_path: Path) -> None:
    new, old = write_yaml(tmp_path / "new", TINY), write_yaml(tmp_path / "old", TINY)
    edit_text(
        old,
        ("CausalConditionalDecoder", "ConditionalDecoder\n            causal: True"),
        ("static_chunk_size: !ref <chunk_size>\n", "\n"),
        ("static_chunk_size: !ref <chunk_size> * <token_mel_ratio>\n", "\n"),
        name="cosyvoice.yaml",
    )
    assert read(old.parent) == read(new.parent)


def test_a_folder_of_moss_speech(tmp_path: Path) -> None:
    write_moss_speech_yaml(tmp_path, TINY)
    for name in ("flow.pt", "flow-chunk-25.pt", "flow-chunk-5.pt"):
        (tmp_path / name).touch()
    config = read_config(tmp_path)
    assert (config.block_tokens, config.lookahead_tokens, config.token_mel_ratio) == (5, 3, 4)
    assert (config.token_frame_rate, config.samples_per_token) == (12.5, 1920)
    assert weights_file(tmp_path, config.weights_names("flow")).name == "flow-chunk-5.pt"
    assert config.hops(StreamConfig()) == (10, 50)
    longer = config.with_stream_settings(StreamConfig(block_tokens=25))
    assert weights_file(tmp_path, longer.weights_names("flow")).name == "flow-chunk-25.pt"
    assert (longer.block_tokens, longer.hops(StreamConfig())) == (25, (25, 50))
    with pytest.raises(
        ConfigError,
        match=r"^stream\.block_tokens: 10, but the folder has weights for blocks of 5, 25 tokens",
    ):
        config.with_stream_settings(StreamConfig(block_tokens=10))
    (tmp_path / "flow-chunk-5.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"contains none of flow-chunk-5.safetensors, flow-chunk-5.pt$"
    ):
        weights_file(tmp_path, config.weights_names("flow"))
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"contains none of cosyvoice2\.yaml, .*config\.yaml$"):
        read_config(tmp_path)


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


def test_no_graph_is_exported_for_blocks_of_the_settings(dynamic: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"runtime\.backend: onnx cannot run stream\.block_tokens; set torch"
    ):
        Token2Wav.load(
            dynamic, stream=StreamConfig(block_tokens=10), runtime=RuntimeConfig(backend="onnx")
        )
