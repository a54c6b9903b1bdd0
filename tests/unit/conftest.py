from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from tests.serving.replies import Expected
from tests.support.batches import WHOLE_BLOCKS
from tests.support.flows import cached_flow
from tests.support.stages import two_stages
from tests.unit.material import TINY, FaultyVocoder, demo_tokens, demo_voice
from token2wav import RuntimeConfig, Token2Wav, Voice
from token2wav.execution.assemble import load_network
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.families.cosyvoice3.noise import load_flow_noise, load_source_noise
from token2wav.networks.ode import EulerSolver


@pytest.fixture(scope="session")
def config() -> CosyVoice3Config:
    return CosyVoice3Config.read(TINY)


@pytest.fixture(scope="session")
def loaded_model() -> Token2Wav:
    torch.set_num_threads(1)
    return Token2Wav.load(TINY, stream=WHOLE_BLOCKS, runtime=RuntimeConfig(device="cpu"))


@pytest.fixture
def model(loaded_model: Token2Wav) -> Iterator[Token2Wav]:
    """The tiny model; whatever a test does, nothing may stay open in its engines."""
    yield loaded_model
    assert loaded_model.pipeline.open_streams == 0


@pytest.fixture(scope="session")
def voice() -> Voice:
    """A prompt of exactly one block: the first chunk takes 25 new tokens, and 3 to look ahead."""
    return demo_voice(25)


@pytest.fixture(scope="session")
def expected(loaded_model: Token2Wav, voice: Voice) -> Expected:
    """Audio of the first n demo tokens in the fixture `voice`."""
    return cache(lambda count: loaded_model.synthesize(demo_tokens(count), voice))


@pytest.fixture(scope="session")
def _faulty(config: CosyVoice3Config) -> tuple[Token2Wav, FaultyVocoder]:
    flow_noise, source_noise = load_flow_noise(TINY, config), load_source_noise(TINY, config)
    vocoder = FaultyVocoder(load_network(TINY, config, "vocoder"), source_noise)
    flow = load_network(TINY, config, "flow")
    solver = EulerSolver(flow.estimator, config.ode_steps, config.flow.inference_cfg_rate)
    engine = cached_flow(config, flow, flow_noise, {config.ode_steps: solver}, pages=65)
    return Token2Wav(config, two_stages(engine, vocoder), WHOLE_BLOCKS), vocoder


@pytest.fixture
def faulty(_faulty: tuple[Token2Wav, FaultyVocoder]) -> Iterator[tuple[Token2Wav, FaultyVocoder]]:
    """The tiny model on a vocoder that tests can make fail; checks that no stream stays open."""
    yield _faulty
    _faulty[1].fault = _faulty[1].open_fault = None
    assert _faulty[0].pipeline.open_streams == 0
