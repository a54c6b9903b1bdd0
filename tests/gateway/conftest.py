from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.rigs.aligners import installed


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
