"""Formats and precisions of codecs: each gives the public audio, or has the stated error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testkit.models.codec_models import CODECS, FORMATS, drawn_tokens
from testkit.models.folders import GOLDEN_CODECS, golden_of, write_folder
from testkit.models.shards import divide
from testkit.utterances import chunks_of, joined, off, portions
from tests.families.tolerances import PARITY
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.config.settings import DecoderPrecision
from token2wav.errors import ConfigError
from token2wav.published.checkpoint_files import PUBLISHED, weights_file
from token2wav.published.registry import read_config

EXACT = StreamConfig(lookahead_frames=0)  # early audio depends on how tokens are portioned
# Largest error of the audio relative to its spread, and of a stream relative to the whole. In
# float16 other batches round other operands up, so a stream is no nearer to the whole than both are
# to float32.
PRECISIONS: dict[DecoderPrecision, tuple[float, float]] = {
    "float16x3": (PARITY, PARITY),
    "float16": (0.02, 0.02),
}
WITHOUT_CONVOLUTIONS = "lfm2_audio", "moss", "moss_stereo"  # in which nothing is rounded


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CODECS)
def test_a_decoder_precision_has_its_error(
    name: str, precision: DecoderPrecision, tmp_path: Path
) -> None:
    runtime = RuntimeConfig(device="cpu", decoder_precision=precision)
    model = Token2Wav.load(write_folder(name, tmp_path), stream=EXACT, runtime=runtime)
    tokens = drawn_tokens(model.config, 20)
    assert model.summary.precision == precision
    exact = Token2Wav.load(tmp_path, stream=EXACT, runtime=RuntimeConfig(device="cpu"))
    expected, whole = (each.synthesize(tokens) for each in (exact, model))
    streamed = joined(chunks_of(model, portions(tokens, [3])))
    of_whole, of_stream = PRECISIONS[precision]
    unchanged = name in WITHOUT_CONVOLUTIONS
    assert (off(whole, expected) == 0) == unchanged
    assert off(whole, expected) <= of_whole * expected.std()
    assert off(streamed, whole) <= of_stream * expected.std()
    if precision == "float16" and not unchanged:
        assert off(whole, expected) > 5 * PARITY * expected.std()


def test_a_decoder_precision_runs_on_torch_only(tmp_path: Path) -> None:
    runtime = RuntimeConfig(device="cpu", backend="onnx", decoder_precision="float16")
    with pytest.raises(ConfigError, match=r"onnx cannot run runtime\.decoder_precision; set"):
        Token2Wav.load(write_folder("mimi", tmp_path), runtime=runtime)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name, codec in FORMATS.items()
        for size in codec.sizes
        if size == "tiny" or not codec.golden
    ],
)
def test_other_formats_give_the_public_audio(name: str, size: str, tmp_path: Path) -> None:
    folder, golden = write_folder(name, tmp_path, size), golden_of(name, size)
    model = Token2Wav.load(folder, stream=EXACT, runtime=RuntimeConfig(device="cpu"))
    tokens = golden["latents" if model.config.tokens.are_latents else "codes"].numpy()
    expected = golden["audio"].numpy()
    assert off(model.synthesize(tokens), expected) <= PARITY * expected.std()


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize("name", GOLDEN_CODECS)
def test_weights_in_several_files(name: str, index: bool, tmp_path: Path) -> None:
    """The shards are divided in the order of `save_pretrained`."""
    folder = write_folder(name, tmp_path)
    path = weights_file(folder, read_config(folder).weights_names("decoder"))
    if path.name not in PUBLISHED:
        pytest.skip("the published file of this format is never divided")
    tokens = drawn_tokens(read_config(folder), 5)
    whole = Token2Wav.load(folder).synthesize(tokens)
    divide(path, index=index)
    np.testing.assert_array_equal(Token2Wav.load(folder).synthesize(tokens), whole)
