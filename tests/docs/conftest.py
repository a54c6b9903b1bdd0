"""The pages that are checked."""

from __future__ import annotations

import pytest

from tests.docs.markdown import PAGES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", PAGES, ids=[page.name for page in PAGES])
