from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from token2wav_server.launcher.memory import default_bound_mib, resident_mib

MACHINE_MIB = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
HOLDER = "held = b'x' * (100 << 20); print(flush=True); input()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDER!r}])"


def test_children_count() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 100 < resident_mib(process.pid) < 200
        process.communicate(b"\n")
    assert resident_mib(process.pid) == 0


@pytest.mark.parametrize(
    ("file", "limit", "bound_mib"),
    [
        ("memory.max", "104857600\n", 80),
        ("memory.max", "max\n", int(0.8 * MACHINE_MIB)),
        ("memory/memory.limit_in_bytes", "52428800\n", 40),
        ("memory/memory.limit_in_bytes", f"{1 << 62}\n", int(0.8 * MACHINE_MIB)),
        ("nothing", "", int(0.8 * MACHINE_MIB)),
    ],
)
def test_default_bound(file: str, limit: str, bound_mib: int, tmp_path: Path) -> None:
    path = tmp_path / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text(limit)
    assert default_bound_mib(tmp_path) == pytest.approx(bound_mib, abs=1)
