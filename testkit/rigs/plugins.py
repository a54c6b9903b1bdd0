"""Plugins of a made-up distribution, with entry points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def installed(
    site: Path, module: str, code: str, group: str, names: Sequence[str]
) -> Iterator[None]:
    """Installs a module into a folder, for this process and its children.

    Args:
        names: names of the module, each with an entry point of the group.
    """
    (site / f"{module}.py").write_text(code)
    (info := site / f"{module}-1.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    points = "".join(f"{name} = {module}:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", str(site), prepend=":")
        yield
