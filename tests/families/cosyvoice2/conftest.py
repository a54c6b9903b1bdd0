from __future__ import annotations

from pathlib import Path

import pytest

from testkit.batches import WHOLE_BLOCKS
from testkit.models.cosyvoice2_model import write_model
from testkit.models.family_golden import FamilyGolden
from token2wav import RuntimeConfig, Token2Wav

CPU = RuntimeConfig(device="cpu", cache_mib=400)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return write_model(tmp_path_factory.mktemp("cosyvoice2"), FamilyGolden("cosyvoice2", "tiny"))


@pytest.fixture(scope="session")
def model(folder: Path) -> Token2Wav:
    return Token2Wav.load(folder, stream=WHOLE_BLOCKS, runtime=CPU)
