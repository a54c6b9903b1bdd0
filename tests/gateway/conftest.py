from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.rigs.aligners import write_distribution


@pytest.fixture(scope="session")
def made_up_aligners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a distribution with aligners, for this process and its children."""
    site = tmp_path_factory.mktemp("site")
    write_distribution(site)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield site
