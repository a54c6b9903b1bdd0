"""Model repository of Triton for other models than CosyVoice3: shapes and vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from testkit.models.codec_models import WRITERS
from testkit.models.family_golden import FamilyGolden
from testkit.models.golden import ROOT, TINY
from token2wav_server.launcher.repository import prepare

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
    model = WRITERS[codec](tmp_path / "model", FamilyGolden(codec, "tiny"))
    names = ["token2wav", "token2wav_ensemble"]
    prepare(REPOSITORY, names, model, tmp_path / "models")
    for name in names:
        config = config_of(tmp_path / "models", name)
        assert config.parameters["vocabulary"].string_value == vocabulary
        dims = {entry.name: list(entry.dims) for entry in config.input}
        assert shapes.items() <= dims.items()
