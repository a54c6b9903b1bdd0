from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.rigs.aligners import installed
from testkit.rigs.door_fixtures import _servers_are_empty, rig, voice
from testkit.rigs.gateway_fixtures import _gateway_is_idle, gateway, speaker, start_gateway

__all__ = [
    "_gateway_is_idle",
    "_servers_are_empty",
    "gateway",
    "rig",
    "speaker",
    "start_gateway",
    "voice",
]


@pytest.fixture(scope="session")
def made_up_aligners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a distribution with aligners, for this process and its children."""
    site = tmp_path_factory.mktemp("site")
    with installed(site):
        yield site


@pytest.fixture
def anyio_backend() -> str:
    """Event loop of tests that are coroutines."""
    return "asyncio"
