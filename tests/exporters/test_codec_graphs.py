"""Graphs of codec decoders: streams on an exported decoder equal torch, alone and in batches."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from testkit.batches import spoken_together
from testkit.models.codec_models import CODECS, drawn_tokens
from testkit.models.folders import write_folder
from testkit.utterances import chunks_of, joined, off, portions
from token2wav import ConfigError, RuntimeConfig, StreamConfig, Token2Wav, UtteranceOptions
from token2wav.published.artifacts import EngineFolder
from token2wav.voice import voice_for
from token2wav_export.cli import DONE, FAILED, main
from token2wav_export.making import Maker

EXPORTABLE = [name for name, codec in CODECS.items() if not codec.windows]
PARITY = 1e-5  # of the deviation of the audio, as on torch


# An export takes ten seconds, so `make test` runs one: of a decoder with all kinds of layers.
@pytest.fixture(
    scope="module",
    params=[
        "mimi",
        *(pytest.param(name, marks=pytest.mark.slow) for name in EXPORTABLE if name != "mimi"),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with its exported decoder, as the command makes it."""
    written = write_folder(request.param, tmp_path_factory.mktemp(request.param))
    assert main(["onnx", "--model", str(written)]) == DONE
    return written


def load(folder: Path, backend: str) -> Token2Wav:
    runtime = RuntimeConfig(device="cpu", backend=backend)  # type: ignore[arg-type]
    exact = StreamConfig(lookahead_frames=0)  # early audio depends on how tokens are portioned
    return Token2Wav.load(folder, stream=exact, runtime=runtime)


def test_streams_equal_torch(folder: Path) -> None:
    torch_model, exported = load(folder, "torch"), load(folder, "onnx")
    assert exported.summary.name == "onnx"
    tokens = [
        drawn_tokens(exported.config, count) for count in (140, 33)
    ]  # longer than the windows
    if exported.config.tokens.fewer_codebooks:
        tokens[1] = tokens[1][:, :1]
    references = [torch_model.synthesize(codes) for codes in tokens]
    alone = joined(chunks_of(exported, portions(tokens[0], [3, 40, 1])))
    assert off(alone, references[0]) <= PARITY * references[0].std()
    config = exported.config
    utterances = [(voice_for(config, None), config.tokens.checked(codes), 0) for codes in tokens]
    together = spoken_together(exported.pipeline, utterances)
    for audio, expected in zip(together, references, strict=True):
        assert off(audio, expected) <= PARITY * expected.std()


def test_noise_is_turned_off_for_a_stream(folder: Path) -> None:
    torch_model, exported = load(folder, "torch"), load(folder, "onnx")
    if not exported.config.adds_noise:
        pytest.skip("the decoder adds no noise")
    tokens = drawn_tokens(exported.config, 60)
    expected = torch_model.synthesize(tokens, options=UtteranceOptions(decoder_noise=False))
    audio = exported.synthesize(tokens, options=UtteranceOptions(decoder_noise=False))
    assert off(audio, expected) <= PARITY * expected.std()
    assert off(exported.synthesize(tokens), expected) > PARITY * expected.std()


def test_verify_compares_the_decoder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", "--model", str(folder), "--device", "cpu", "--seconds", "2", "--json"]
    assert main(command) == DONE
    report = json.loads(capsys.readouterr().out)
    assert report["backend"] == "onnx"
    assert report["mel_max"] is None
    assert 80 < report["audio_snr_db"] < 240  # other sums than torch, so not equal bit by bit


def test_a_graph_names_its_tokens_and_states(folder: Path) -> None:
    path = EngineFolder(folder).find("decoder", "float32", "onnx")
    graph = onnx.load(path, load_external_data=False).graph
    inputs = [value.name for value in graph.input]
    assert inputs[0] == "tokens"
    assert [value.name for value in graph.output] == [
        "audio",
        *(name.replace("past_", "new_", 1) for name in inputs[1:] if name != "noise_factor"),
    ]


def test_a_graph_of_a_flow_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["onnx", "--model", str(folder), "--graphs", "step"]) == FAILED
    assert "step: this model has no such graph; it has decoder" in capsys.readouterr().err


def test_tensorrt_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="tensorrt cannot run a codec decoder; set torch or onnx"):
        load(folder, "tensorrt")
    maker = Maker(EngineFolder(folder), ["pytest"])
    assert maker.model.onnx_graphs == ("decoder",)
