from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from testkit.models.few_convolutions import a_tiny_model
from testkit.models.sized import SIZES, random_model
from tests.exporters.rig import Export
from token2wav.assembly import Exportable, exportable
from token2wav.published.artifacts import EngineFolder, GraphName, Precision
from token2wav_export.making import Maker


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by name: the tiny one with golden weights in its flow and few convolutions in
    its vocoder, and a wider one with random weights.

    The wider one has a single layer, because the time of an export grows with its operations.
    """
    return {
        "tiny": a_tiny_model(tmp_path_factory.mktemp("tiny")),
        "wide": random_model(tmp_path_factory.mktemp("wide"), SIZES["small"] | {"depth": 1}),
    }


@pytest.fixture(scope="session")
def networks(models: dict[str, Path]) -> Exportable:
    modules: Exportable = exportable(models["tiny"])
    return modules


@pytest.fixture(scope="session")
def engine_folders(models: dict[str, Path]) -> dict[str, EngineFolder]:
    """Folders with the exports of a session, by model."""
    return {name: EngineFolder(folder) for name, folder in models.items()}


@pytest.fixture(scope="session")
def export(models: dict[str, Path], engine_folders: dict[str, EngineFolder]) -> Export:
    """Exports a graph, once per session: it takes many seconds."""

    @cache
    def exported(model: str, graph: GraphName, precision: Precision) -> Path:
        return Maker(engine_folders[model], ["pytest"]).onnx(graph, precision)

    return exported
