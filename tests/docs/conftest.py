"""The pages that are checked."""

from __future__ import annotations

import pytest

from tests.docs.markdown import CONTRIBUTING, PAGES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "page" in metafunc.fixturenames:
        pages = (*PAGES, CONTRIBUTING)
        metafunc.parametrize("page", pages, ids=[page.name for page in pages])
