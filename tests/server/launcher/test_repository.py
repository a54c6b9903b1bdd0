"""Model repository of Triton for other models than CosyVoice3: shapes and vocabulary."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from testkit.models.folders import write_folder
from testkit.models.golden import ROOT, TINY
from token2wav_server.front.build import LIBRARY
from token2wav_server.launcher.repository import has_python_models, prepare, selected

REPOSITORY = ROOT / "model_repository"


def config_of(repository: Path, name: str) -> model_config_pb2.ModelConfig:
    text = (repository / name / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.mark.parametrize("name", ["token2wav", "token2wav_ensemble"])
def test_the_repository_fits_cosyvoice3(name: str, tmp_path: Path) -> None:
    prepare(REPOSITORY, [name], TINY, tmp_path)
    assert config_of(tmp_path, name) == config_of(REPOSITORY, name)
    assert config_of(tmp_path, name).parameters["vocabulary"].string_value == "6561"


@pytest.mark.parametrize(
    ("codec", "vocabulary", "shapes"),
    [
        ("mimi", "16,16,16,16", {"tokens": [-1, -1]}),  # a stream may have fewer codebooks
        ("nanocodec", "60,60", {"tokens": [-1, 2]}),
        ("pocket_tts", "", {"latents": [-1, 5], "latents_fp16": [-1, 5]}),
    ],
)
def test_a_codec_has_its_shapes_and_a_number_for_each_codebook(
    codec: str, vocabulary: str, shapes: dict[str, list[int]], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    model = write_folder(codec, tmp_path / "model")
    names = ["token2wav", "token2wav_ensemble"]
    prepare(REPOSITORY, names, model, tmp_path / "models")
    for name in names:
        config = config_of(tmp_path / "models", name)
        assert config.parameters["vocabulary"].string_value == vocabulary
        dims = {entry.name: list(entry.dims) for entry in config.input}
        assert shapes.items() <= dims.items()


def test_files_of_a_repository_of_ones_own(tmp_path: Path) -> None:
    """Its models find the files beside them, and its own library of the front is used."""
    own, library = tmp_path / "own", tmp_path / "native.so"
    shutil.copytree(REPOSITORY, own)
    for file in (own / "words.txt", own / "token2wav" / LIBRARY):
        file.write_text("mine")
    prepare(own, ["token2wav", "flow"], TINY, tmp_path / "models", library)
    models = tmp_path / "models"
    assert {entry.name for entry in models.iterdir()} == {"words.txt", "token2wav", "flow"}
    assert (models / "words.txt").read_text() == "mine"
    assert (models / "token2wav" / LIBRARY).read_text() == "mine"
    assert config_of(models, "token2wav").backend == "token2wav"
    assert has_python_models(models)
    shutil.rmtree(models / "flow")
    assert not has_python_models(models), "the native front is no Python model"
    config = models / "token2wav" / "config.pbtxt"
    config.write_text("# backend: \"python\"\nname: 'a' backend: 'python'\n")
    assert has_python_models(models)
    config.write_text("# backend: \"python\"\nname: 'a' backend: 'onnxruntime'\n")
    assert not has_python_models(models)


def test_models_that_a_model_calls_are_loaded_too(tmp_path: Path) -> None:
    """Triton's own ensembles name them as steps."""
    assert selected(REPOSITORY, ["token2wav_ensemble"]) == ["flow", "token2wav_ensemble", "vocoder"]
    for name in ("both", "one", "other"):
        (tmp_path / name).mkdir()
    steps = 'step [ { model_name: "one" model_version: -1 }, { model_name: "other" } ]'
    (tmp_path / "both" / "config.pbtxt").write_text(f"ensemble_scheduling {{ {steps} }}")
    assert selected(tmp_path, ["both"]) == ["both", "one", "other"]
