"""Fixtures of servers of the tiny model in the process of a test. The fixture `loaded_model` is the
library to compare them with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from testkit.batches import WHOLE_BLOCKS
from testkit.models.tiny_model import ODE_STEPS, TINY, demo_voice
from testkit.rigs.door_server import DoorServer
from token2wav.config import LimitConfig, ServerConfig
from token2wav_client import ClientVoice

_STREAM = replace(WHOLE_BLOCKS, steps=(ODE_STEPS,))


@pytest.fixture(scope="session")
def voice() -> ClientVoice:
    made = demo_voice(30)
    return ClientVoice(made.prompt_tokens, made.prompt_mel, made.speaker_embedding)


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoorServer]:
    """A server of the tiny model."""
    folder = tmp_path_factory.mktemp("repository")
    with DoorServer.start(TINY, folder, ServerConfig(_STREAM)) as server:
        yield server


@pytest.fixture(scope="session")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoorServer]:
    """A server of the tiny model for two streams."""
    config = ServerConfig(_STREAM, limits=LimitConfig(streams=2))
    with DoorServer.start(TINY, tmp_path_factory.mktemp("repository"), config) as server:
        yield server


@pytest.fixture(autouse=True)
def _servers_are_empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks after every test, passed or failed, that its servers have no stream."""
    yield
    for name in ("rig", "limited"):
        if name in request.fixturenames:
            request.getfixturevalue(name).wait_until_empty()
