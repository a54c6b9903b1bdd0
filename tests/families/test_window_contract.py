"""Contract of codecs that decode windows (`Codec.windows` in `testkit/models/codec_models.py`): the
audio depends on the tokens alone, and with all context it is that of the whole utterance.

`test_codec_contract.py` tests their whole utterances.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testkit.batches import spoken_together
from testkit.graph_pool import PoolWithoutGraphs
from testkit.models.codec_models import CODECS, drawn_tokens
from testkit.models.folders import golden_of, write_folder
from testkit.tables import table
from testkit.utterances import Audio, chunks_of, joined, off, portions
from testkit.window_memory import kept_bytes
from tests.families.tolerances import PARITY
from token2wav import ConfigError, RuntimeConfig, StreamConfig, Token2Wav
from token2wav.assembly import family_for
from token2wav.execution.captured_sizes import CAPTURED_WINDOWS
from token2wav.families.family import StageParts
from token2wav.published.registry import read_config
from token2wav.stages.windows import WindowStage
from token2wav.voice import voice_for

CPU = RuntimeConfig(device="cpu")
NAMES = [name for name, codec in CODECS.items() if codec.windows]
COUNTS = (71, 40, 9, 1, 50)
Model = Token2Wav


@pytest.fixture(
    scope="module",
    params=[(name, engine) for name in NAMES for engine in ("own numbers", "prepared numbers")],
    ids="-".join,
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A codec whose batches have any number of windows, or are cut into numbers as on a GPU."""
    name, engine = request.param
    model = Token2Wav.load(write_folder(name, tmp_path_factory.mktemp(name)), runtime=CPU)
    if engine == "prepared numbers":
        stage, config = decoder(model), model.config
        prepared = WindowStage(stage._net, config.windows, rows=(1, 2, 4))  # type: ignore[attr-defined]
        model.pipeline.stages = {"decoder": prepared}
    return model


@pytest.fixture
def codec(loaded: Model) -> Iterator[Model]:
    yield loaded
    assert loaded.pipeline.open_streams == 0


def decoder(model: Model) -> Any:
    [stage] = model.pipeline.stages.values()
    return stage


def alone(model: Model, count: int) -> Audio:
    return model.synthesize(drawn_tokens(model.config, count))


@pytest.mark.parametrize("sizes", [[1], [2, 3, 1], [41, 30]], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_a_stream_has_the_same_audio_in_any_portions(
    codec: Model, count: int, sizes: list[int]
) -> None:
    chunks = chunks_of(codec, portions(drawn_tokens(codec.config, count), sizes))
    expected, audio = alone(codec, count), joined(chunks)
    assert len(audio) == len(expected) == codec.config.samples_per_token * count
    assert off(audio, expected) <= PARITY * expected.std()
    # A chunk has whole windows, and came as soon as its context was there.
    block, ahead = codec.config.block_tokens, codec.config.lookahead_tokens
    assert all(chunk.token_count % block == 0 for chunk in chunks[:-1])
    if sizes == [1]:
        assert chunks[0].token_count == (block if count >= block + ahead else count)


@pytest.mark.parametrize("stagger", [0, 1], ids=["at once", "one after the other"])
def test_a_batch_equals_each_stream_alone(codec: Model, stagger: int) -> None:
    """The windows of a batch have several lengths and positions."""
    nobody = voice_for(codec.config, None)
    utterances = [(nobody, drawn_tokens(codec.config, count), 0) for count in COUNTS]
    together = spoken_together(codec.pipeline, utterances, stagger)
    for count, audio in zip(COUNTS, together, strict=True):
        expected = alone(codec, count)
        assert off(audio, expected) <= PARITY * expected.std(), count


@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize("name", NAMES)
def test_all_context_gives_the_whole_utterance(name: str, size: str, tmp_path: Path) -> None:
    """The windows of a short utterance see all of it, and fade into each other. In windows of a
    part, a long utterance is decoded as the public code does, if it has parts.
    """
    folder, golden = write_folder(name, tmp_path, size), golden_of(name, size)
    config: Any = read_config(folder)
    part, most = config.whole.part, config.whole.right
    block = next(block for block in range(2, part + 1) if part % block == 0)
    codes = golden["codes"].numpy()
    exact = Token2Wav.load(folder, stream=StreamConfig(lookahead_frames=0), runtime=CPU)
    cases = [(codes[: block + most], block, 1)]
    if part < len(codes):
        cases.append((codes, part, 0))
    for tokens, window, overlap in cases:
        stream = StreamConfig(
            block_tokens=window, left_blocks=-1, lookahead_frames=most, overlap_tokens=overlap
        )
        model = Token2Wav.load(folder, stream=stream, runtime=CPU)
        assert model.config.block_tokens == window < len(tokens)
        expected = exact.synthesize(tokens)
        audio = joined(chunks_of(model, portions(tokens, [3])))
        assert off(audio, expected) <= PARITY * expected.std(), window


# Settings of streams, and a part of the sentence that refuses them. The whole of XY-Tokenizer's
# tiny model has parts of 10 tokens, and 5 after each.
SETTINGS = table(
    """
block_tokens: 3         | stream.block_tokens: 3 does not divide 10, the tokens of a part
block_tokens: 20        | stream.block_tokens: 20 does not divide 10
lookahead_frames: 6     | stream.lookahead_frames: 6, expected 0 to 5 for this model
overlap_tokens: 6       | stream.overlap_tokens: 6 is more than the window, 10 tokens, or its
overlap_tokens: 3, block_tokens: 2 | stream.overlap_tokens: 3 is more than the window, 2 tokens
block_tokens: 5, lookahead_frames: 0 | stream.block_tokens: 5, but stream.lookahead_frames: 0
left_blocks: 0, lookahead_frames: 0 | stream.left_blocks: 0, but stream.lookahead_frames: 0
overlap_tokens: 1, lookahead_frames: 0 | stream.overlap_tokens: 1, but stream.lookahead_frames: 0
max_hop_tokens: 15      | stream.max_hop_tokens: 15 is not a multiple of the attention block or wi
"""
)


@pytest.mark.parametrize(("settings", "sentence"), SETTINGS, ids=lambda cell: cell[:24])
def test_settings_that_are_refused(settings: str, sentence: str, tmp_path: Path) -> None:
    folder = write_folder("xy_tokenizer", tmp_path)
    values: Any = yaml.safe_load(f"{{{settings}}}")
    stream = StreamConfig(**values)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        Token2Wav.load(folder, stream=stream, runtime=CPU)


@pytest.mark.parametrize(
    "settings",
    [
        StreamConfig(block_tokens=2, left_blocks=2, lookahead_frames=2, overlap_tokens=1),
        StreamConfig(block_tokens=2, left_blocks=2, lookahead_frames=2, overlap_tokens=0),
        StreamConfig(lookahead_frames=0),
    ],
    ids=["windows", "without overlap", "whole"],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_stream_of_a_batch_keeps_the_memory_of_its_configuration(
    name: str, settings: StreamConfig, tmp_path: Path
) -> None:
    model = Token2Wav.load(write_folder(name, tmp_path), stream=settings, runtime=CPU)
    config: Any = model.config
    if settings.lookahead_frames:
        assert kept_bytes(model, 8) == config.stream_bytes
    else:
        assert kept_bytes(model, 8) == 0 < config.stream_bytes


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (StreamConfig(), len(CAPTURED_WINDOWS)),
        (StreamConfig(left_blocks=8, lookahead_frames=50), len(CAPTURED_WINDOWS)),
        (StreamConfig(left_blocks=-1), 0),
        (StreamConfig(lookahead_frames=0), 0),
    ],
    ids=["own", "longer", "all of the past", "whole"],
)
def test_graphs_are_captured_for_short_windows_only(
    settings: StreamConfig, count: int, tmp_path: Path
) -> None:
    """A window of 10 minutes would take gigabytes, and no window of a usual stream is so long."""
    model = Token2Wav.load(write_folder("neucodec", tmp_path), stream=settings, runtime=CPU)
    graphs: Any = PoolWithoutGraphs()
    parts = StageParts(model.config, "decoder", decoder(model)._net, None, {}, 25, graphs)
    family_for(model.config).own_stage(parts)
    assert graphs.captures == count


def test_windows_are_refused_elsewhere(tmp_path: Path) -> None:
    """By a codec without windows, and by a backend that exports its networks."""
    (tmp_path / "mimi").mkdir()
    with pytest.raises(ConfigError, match=r"^stream.overlap_tokens: 1, but this model has no win"):
        Token2Wav.load(
            write_folder("mimi", tmp_path / "mimi"), stream=StreamConfig(overlap_tokens=1)
        )
    runtime = RuntimeConfig(device="cpu", backend="onnx")
    with pytest.raises(ConfigError, match=r"onnx cannot run windows \(a decoder that is not"):
        Token2Wav.load(write_folder("xy_tokenizer", tmp_path), runtime=runtime)


@pytest.mark.parametrize("name", sorted({*CODECS} - {*NAMES, "audex"}))
def test_a_fixed_past_has_no_setting(name: str, tmp_path: Path) -> None:
    config = read_config(write_folder(name, tmp_path))
    for blocks in (-1, 0):
        with pytest.raises(ConfigError, match=f"^stream.left_blocks: {blocks}, but .* fixed past"):
            config.with_stream_settings(StreamConfig(left_blocks=blocks))
