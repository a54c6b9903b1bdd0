"""Fixtures of a gateway under test, in front of the server of the fixture `rig`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest

from testkit.patience import until
from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_rig import GatewayRig
from testkit.rigs.language_model import LanguageModel
from testkit.rigs.server_rig import Rig
from token2wav_client import ClientVoice

StartGateway: TypeAlias = Callable[..., AbstractContextManager[GatewayRig]]


@pytest.fixture(scope="module")
def speaker(request: pytest.FixtureRequest) -> LanguageModel:
    """Language model behind `gateway`, with the constant PACE of the module."""
    return LanguageModel(pace=getattr(request.module, "PACE", 1000.0))


@pytest.fixture(scope="module")
def gateway(
    rig: Rig | DoorServer,
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


@pytest.fixture
def start_gateway(rig: Rig | DoorServer, voice: ClientVoice, tmp_path: Path) -> StartGateway:
    """Starts another gateway; see `GatewayRig.between`."""
    url = rig.server.grpc_url
    return partial(GatewayRig.between, folder=tmp_path, grpc_url=url, voice=voice)


@pytest.fixture(autouse=True)
def _gateway_is_idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks after every test, passed or failed, that its gateway speaks to nobody."""
    yield
    if "gateway" in request.fixturenames:
        gateway = request.getfixturevalue("gateway")
        until(lambda: not any(map(gateway.value, ("speaking", "sockets", "held_back"))))
