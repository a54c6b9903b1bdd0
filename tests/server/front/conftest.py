from __future__ import annotations

from pathlib import Path

import pytest

from token2wav_server.front.build import compile_front, cxx_compiler, native_front


@pytest.fixture(scope="session")
def compiler() -> list[str]:
    command = cxx_compiler()
    if command is None:
        pytest.skip("no C++ compiler on this machine")
    return command


@pytest.fixture(scope="session")
def native_library(compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_front() or compile_front(compiler, tmp_path_factory.mktemp("front"))
