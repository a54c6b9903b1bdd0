"""Graphs of other families than CosyVoice3: streams on their exported step equal torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testkit.batches import WHOLE_BLOCKS
from testkit.models import bigvgan_model
from testkit.models.few_convolutions import with_few_convolutions
from testkit.models.folders import write_folder
from testkit.models.golden import snr_db
from testkit.models.sized import a_voice
from testkit.utterances import off, some_tokens, streamed_mels
from token2wav import RuntimeConfig, Token2Wav, backends
from token2wav.backends import Backend
from token2wav.exported.run import OnnxModule
from token2wav.published.artifacts import EngineFolder
from token2wav_export.cli import main
from token2wav_export.making import Maker

MEL = 2e-5  # of float32, as on torch
AUDIO_DB = 40.0


Pair = tuple[Token2Wav, Token2Wav]


def load(folder: Path, engine: str) -> Token2Wav:
    runtime = RuntimeConfig(device="cpu", backend=engine, cache_mib=200)  # type: ignore[arg-type]
    return Token2Wav.load(folder, stream=WHOLE_BLOCKS, runtime=runtime)


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a CosyVoice2 without exports."""
    written = write_folder("cosyvoice2", tmp_path_factory.mktemp("cosyvoice2"))
    return with_few_convolutions(written / "cosyvoice2.yaml")


@pytest.fixture(scope="session")
def cosyvoice2(published: Path) -> Path:
    """The same folder with all that a service needs, as the command makes it."""
    assert main(["onnx", "--model", str(published)]) == 0
    return published


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("cosyvoice2", marks=pytest.mark.slow),
        "moss_speech",
        "stepaudio2",
        "turbo",
    ],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model on torch, and with its exported step.

    The vocoder is exported for CosyVoice2 only: it is the same.
    """
    if request.param == "cosyvoice2":
        folder: Path = request.getfixturevalue("cosyvoice2")
        return load(folder, "torch"), load(folder, "onnx")
    folder = write_folder(request.param, tmp_path_factory.mktemp(request.param))
    if request.param != "turbo":
        graph = OnnxModule(
            Maker(EngineFolder(folder), ["pytest"]).onnx("step", "float32"),
            torch.device("cpu"),
        )
    else:  # without guidance; the graph itself is CosyVoice2's, so torch runs in its place
        graph = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_onnx", lambda *_: Backend("onnx", graph))
        return load(folder, "torch"), load(folder, "onnx")


@pytest.mark.parametrize(("prompt", "count"), [(0, 53), (30, 128), (80, 60)])
def test_a_streamed_mel_is_that_of_the_whole_on_torch(pair: Pair, prompt: int, count: int) -> None:
    reference, exported = pair
    assert exported.summary.name == "onnx"
    voice, tokens = a_voice(reference.config, prompt_tokens=prompt), some_tokens(count)
    [mel] = streamed_mels(exported, (tokens, voice))
    assert off(mel, reference.mel(tokens, voice)) <= MEL


@pytest.mark.slow
def test_audio_comes_from_both_graphs(cosyvoice2: Path) -> None:
    reference, exported = load(cosyvoice2, "torch"), load(cosyvoice2, "onnx")
    voice, tokens = a_voice(reference.config), some_tokens(90)
    audio = exported.synthesize(tokens, voice)
    assert len(audio) == 960 * len(tokens)
    assert snr_db(audio, reference.synthesize(tokens, voice)) >= AUDIO_DB


@pytest.mark.slow
def test_bigvgan_is_exported_as_a_vocoder(tmp_path: Path) -> None:
    folder = bigvgan_model.write_model(tmp_path / "model")
    assert main(["onnx", "--model", str(folder)]) == 0
    reference, exported = load(folder, "torch"), load(folder, "onnx")
    voice, tokens = a_voice(reference.config), some_tokens(60)
    audio = exported.synthesize(tokens, voice)
    assert len(audio) == bigvgan_model.SAMPLES_PER_TOKEN * len(tokens)
    assert snr_db(audio, reference.synthesize(tokens, voice)) >= AUDIO_DB


@pytest.mark.parametrize("family", ["streamflow", "qwen25_omni"])
def test_guided_attention_has_no_graphs(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(family, tmp_path)
    assert main(["onnx", "--model", str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"token2wav export: error: {folder}: guided attention (one mask for each layer, no cached "
        "past) runs only on torch, so there are no graphs to export\n"
    )
    assert not (folder / "engines").exists()


def test_the_public_call_is_of_cosyvoice3_only(
    published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["onnx", "--model", str(published), "--graphs", "estimator-full"]) == 3
    assert (
        "estimator-full: only CosyVoice3 has this graph; export the graphs step and vocoder"
        in capsys.readouterr().err
    )
