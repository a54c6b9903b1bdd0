from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from testkit.batches import WHOLE_BLOCKS
from testkit.models.golden import TINY, GoldenSet
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_fixtures import _gateway_is_idle, gateway, speaker
from testkit.rigs.server_rig import BOTH_MODELS, Rig, voice_inputs
from token2wav import StreamConfig, Token2Wav
from token2wav_client import ClientVoice
from token2wav_client.base import BaseClient
from token2wav_server.launcher.access import Access

__all__ = ["_gateway_is_idle", "gateway", "speaker"]

RESPONSE_SECONDS = 120.0
IDLE_SECONDS = 5  # of the server with small limits
STEPS = (10, 1)  # ODE steps that a request may choose
FIRST, LOOKAHEAD = StreamConfig().first_tokens, StreamConfig().provisional_lookahead_tokens
ANNA = "anna"  # voice that the server knows by name


@pytest.fixture(scope="module")
def admin_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of a server's admin key, which the server writes."""
    return tmp_path_factory.mktemp("admin") / "key"


@pytest.fixture(scope="session", autouse=True)
def _patient_clients() -> Iterator[None]:
    """Raises the timeouts of clients, because a server on a busy machine is silent for longer."""
    usual = BaseClient.__init__.__kwdefaults__ or {}
    with pytest.MonkeyPatch.context() as patch:
        patient = {"connect_timeout_s": 60.0, "response_timeout_s": RESPONSE_SECONDS}
        patch.setattr(BaseClient.__init__, "__kwdefaults__", usual | patient)
        yield


@pytest.fixture(scope="session")
def golden() -> GoldenSet:
    return GoldenSet(TINY)


@pytest.fixture(scope="session")
def model() -> Token2Wav:
    """The library, to compare the server with."""
    return Token2Wav.load(TINY, stream=replace(WHOLE_BLOCKS, steps=STEPS))


@pytest.fixture(scope="session")
def whole(model: Token2Wav, golden: GoldenSet) -> NDArray[np.float32]:
    """Audio of the golden tokens by the library."""
    return model.synthesize(golden.tokens, golden.voice)


@pytest.fixture(scope="session")
def voice(golden: GoldenSet) -> ClientVoice:
    spoken = golden.voice
    return ClientVoice(spoken.prompt_tokens, spoken.prompt_mel, spoken.speaker_embedding)


@pytest.fixture(scope="session")
def rig(golden: GoldenSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A real tritonserver with the tiny model, in one process and as an ensemble.

    Its idle timeout exceeds the patience of a test. So a stream that is freed while a test waits
    was not dropped as idle. Its buffer of a player is so long that no hop is cut short.
    """
    folder = tmp_path_factory.mktemp("server")
    save_file(voice_inputs(golden.voice), folder / f"{ANNA}.safetensors")
    settings = (
        f"stream: {{first_tokens: 0, steps: {list(STEPS)}}}\n"
        f"limits: {{idle_seconds: {2 * PATIENCE_SECONDS}, player_buffer_seconds: 60}}\n"
        f"voices: [{ANNA}.safetensors]"
    )
    with Rig.start(
        TINY, folder, settings, models=BOTH_MODELS, access=Access(http_inference=True)
    ) as rig:
        yield rig


@pytest.fixture(scope="session")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A real tritonserver with both models, small limits, and streams that speak early."""
    settings = (
        f"stream: {{first_tokens: {FIRST}, provisional_lookahead_tokens: {LOOKAHEAD}, "
        f"steps: {list(STEPS)}}}\n"
        f"limits: {{streams: 2, stream_tokens: 200, idle_seconds: {IDLE_SECONDS}}}"
    )
    with Rig.start(TINY, tmp_path_factory.mktemp("limited"), settings, models=BOTH_MODELS) as rig:
        yield rig


@pytest.fixture(params=BOTH_MODELS)
def name(request: pytest.FixtureRequest) -> str:
    """Name of a model on a server with `BOTH_MODELS`."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks after every test, passed or failed, that its servers hold nothing for any stream."""
    yield
    for name in ("rig", "limited", "recipe"):
        if name in request.fixturenames:
            request.getfixturevalue(name).wait_until_empty()
