from __future__ import annotations

import pytest

from tests.stages.rig import Parts, RecordedModel
from token2wav.stages.cached_flow import CachedFlow


@pytest.fixture(scope="session")
def parts() -> Parts:
    return Parts.load()


@pytest.fixture(scope="session")
def engine(parts: Parts) -> CachedFlow:
    """Incremental engine with room for all streams, for tests that compare mels only."""
    return parts.incremental()


@pytest.fixture(scope="session")
def model(parts: Parts, engine: CachedFlow) -> RecordedModel:
    return parts.model(engine)
