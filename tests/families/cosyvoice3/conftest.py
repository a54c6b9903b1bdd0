from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testkit.models.golden import GoldenSet, golden_sets
from token2wav.assembly import load_network
from token2wav.execution.device import keep_arithmetic_exact
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.cosyvoice3.noise import load_flow_noise, load_source_noise
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import FlowNoise, SourceNoise

SETS = golden_sets()


@pytest.fixture(scope="session", params=SETS, ids=[golden.folder.name for golden in SETS])
def golden(request: pytest.FixtureRequest) -> GoldenSet:
    return request.param


@pytest.fixture(scope="session")
def folder(golden: GoldenSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden.model_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def config(folder: Path) -> CosyVoice3Config:
    return CosyVoice3Config.read(folder)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
def device(request: pytest.FixtureRequest) -> torch.device:
    device = torch.device(request.param)
    keep_arithmetic_exact(device)
    return device


@pytest.fixture(scope="session")
def flow(folder: Path, config: CosyVoice3Config, device: torch.device) -> Flow:
    return load_network(folder, config, "flow").to(device)


@pytest.fixture(scope="session")
def hift(folder: Path, config: CosyVoice3Config, device: torch.device) -> HiFT:
    return load_network(folder, config, "vocoder").to(device)


@pytest.fixture(scope="session")
def noises(folder: Path, config: CosyVoice3Config) -> tuple[FlowNoise, SourceNoise]:
    return load_flow_noise(folder, config), load_source_noise(folder, config)
