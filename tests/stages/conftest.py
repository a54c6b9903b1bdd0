from __future__ import annotations

import pytest

from tests.stages.rig import Parts


@pytest.fixture(scope="session")
def parts() -> Parts:
    return Parts.load()
