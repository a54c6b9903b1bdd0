"""Every kernel compiles for common GPUs at the size of the public model, and its data fits into
registers and shared memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
SHARED_BYTES = {
    80: 163 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # shared memory of a program, by compute capability

VOCODER = 23  # kernels of the vocoder, in the variants of both kinds of HiFT
# Kernels without tiles of neighbouring numbers to load. A state of two positions has none either,
# and rows of 50 frames do not begin at multiples of 16 bytes.
NARROW = {"_store_state", "_euler_step", "frame_phases", "excite", "synthesise"}
SINE_BYTES = 40  # stack of the sine of float32, for angles above 10^5
FEW_BYTES = 32  # tolerated spills of registers, because compilers differ a little


def binaries(capability: int, storages: list[str], folder: Path) -> list[list[str]]:
    """Compiles all kernels for a GPU, and returns the columns of the compiler's table."""
    # In a process of its own: in this one kernels are interpreted.
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, str(SCRIPT), f"{capability}:{','.join(storages)}"]
    output = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout
    return [line.split()[1:] for line in output.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "storages", "kernels"),
    [
        (80, ["float16", "int8"], 62),
        (90, ["float32", "float16", "int8", "float8"], 84),
        (100, ["float16", "int8", "float8"], 69),
    ],
)
def test_kernels_compile_without_a_gpu(
    capability: int, storages: list[str], kernels: int, tmp_path: Path
) -> None:
    lines = binaries(capability, storages, tmp_path)
    assert len(lines) == kernels + VOCODER, (
        "a kernel is compiled once for each size of the models, whatever the batch, and kernels "
        "with matrix products for two or three widths of tiles"
    )
    for name, storage, _, spilled, shared, wide in lines:
        if storage != "float32":  # float32 pages are only a reference
            few = FEW_BYTES + (SINE_BYTES if storage == "mel" else 0)
            assert int(spilled) <= few, f"{name} on {storage} pages runs out of registers"
        assert int(shared) <= SHARED_BYTES[capability]
        assert int(wide) > 0 or name in NARROW, f"{name} on {storage} loads small pieces"
