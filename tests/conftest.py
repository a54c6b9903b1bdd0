from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported, and inherited by servers that tests start: threads of several processes on few cores wait
# for one another far longer than the small models of these tests take, and sums are only equal with equal threads.
os.environ["OMP_NUM_THREADS"] = "1"

_TESTS = Path(__file__).parent
_TOGETHER = {"deploy": "deployments", "launcher": "servers", "server": "servers", "export": "exports"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Says which tests must run in one worker of `pytest --dist loadgroup`: those of a file, and of some folders.

    Exports take long and are shared, and so are servers.
    """
    file = item.path.relative_to(_TESTS)
    item.add_marker(pytest.mark.xdist_group(_TOGETHER.get(file.parts[0], str(file))))
