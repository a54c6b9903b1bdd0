from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.batches import WHOLE_BLOCKS
from testkit.models.front_end import demo_prompt, front_end
from testkit.models.golden import TINY, GoldenSet
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.gateway_rig import GatewayRig
from testkit.rigs.language_model import LanguageModel
from testkit.rigs.server_rig import Rig
from token2wav import Token2Wav
from token2wav_client import ClientVoice
from token2wav_client.base import BaseClient
from token2wav_voice import PromptVoice

__all__ = ["demo_prompt", "front_end"]

RESPONSE_SECONDS = 120.0
# of the server with small limits: the latter are three times 60 tokens
IDLE_SECONDS, STREAM_SECONDS = 5, 7.2


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
    return Token2Wav.load(TINY, stream=WHOLE_BLOCKS)


@pytest.fixture(scope="session")
def voice(golden: GoldenSet) -> ClientVoice:
    spoken = golden.voice
    return ClientVoice(spoken.prompt_tokens, spoken.prompt_mel, spoken.speaker_embedding)


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A real tritonserver with the tiny model.

    Its idle timeout exceeds the patience of a test. So a stream that is freed while a test waits
    was not dropped as idle.
    """
    settings = f"limits: {{idle_seconds: {2 * PATIENCE_SECONDS}}}"
    with Rig.start(TINY, tmp_path_factory.mktemp("server"), settings) as rig:
        yield rig


@pytest.fixture(scope="session")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A real tritonserver with small limits."""
    settings = f"limits: {{streams: 2, stream_tokens: 60, idle_seconds: {IDLE_SECONDS}}}"
    with Rig.start(TINY, tmp_path_factory.mktemp("limited"), settings) as rig:
        yield rig


@pytest.fixture(scope="module")
def speaker(request: pytest.FixtureRequest) -> LanguageModel:
    """Language model behind `gateway`, with the constant PACE of the module."""
    return LanguageModel(pace=getattr(request.module, "PACE", 1000.0))


@pytest.fixture(scope="module")
def gateway(
    rig: Rig,
    speaker: LanguageModel,
    voice: ClientVoice,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GatewayRig]:
    """A gateway between `speaker` and `rig`, with the constant SETTINGS of the module."""
    with GatewayRig.between(
        speaker.app(),
        tmp_path_factory.mktemp("gateway"),
        grpc_url=rig.server.grpc_url,
        voice=voice,
        settings=getattr(request.module, "SETTINGS", {}),
        riva=True,
    ) as started:
        yield started


@pytest.fixture(params=["token2wav", "token2wav_ensemble"])
def name(request: pytest.FixtureRequest) -> str:
    """Name of a model on a server with `BOTH_MODELS`."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks after every test, passed or failed, that its gateway speaks to nobody, and that its
    servers hold nothing for any stream.
    """
    yield
    if "gateway" in request.fixturenames:
        gateway = request.getfixturevalue("gateway")
        until(lambda: not any(map(gateway.value, ("speaking", "sockets", "held_back"))))
    for name in ("rig", "limited", "recipe"):
        if name in request.fixturenames:
            request.getfixturevalue(name).wait_until_empty()


@pytest.fixture(scope="session")
def spoken(demo_prompt: PromptVoice) -> ClientVoice:
    """Voice of the demo's recording."""
    made = demo_prompt
    return ClientVoice(made.prompt_tokens, made.prompt_mel, made.speaker_embedding)
