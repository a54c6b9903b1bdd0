from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# Before torch is imported, and inherited by servers that tests start: threads of several processes on few cores wait
# for one another far longer than the small models of these tests take, and sums are only equal with equal threads.
os.environ["OMP_NUM_THREADS"] = "1"

# No test asserts speed, which on a busy machine depends on all others.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# By folder of tests: what shares servers, or exports that take long, must run in one worker.
_TOGETHER = {"deploy": "servers", "launcher": "servers", "server": "servers", "docs": "servers", "export": "exports"}


class ByFolder(LoadScopeScheduling):  # type: ignore[misc]
    """Gives workers whole files, and some folders as one (its own `--dist loadgroup` fails with pytest 9.2)."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _TOGETHER.get(file.split("/")[1], file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFolder:
    return ByFolder(config, log)
