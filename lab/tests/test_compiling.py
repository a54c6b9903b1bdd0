"""Every kernel of the published models compiles for common GPUs, and its data fits into registers
and shared memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.models.golden import ROOT

# Shared memory of a program, by compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
# Kernels without tiles of neighbouring numbers to load. A state of two positions has none either,
# and rows of 50 frames do not begin at multiples of 16 bytes. An input with its context may begin
# anywhere. A thread of `_anti_aliased` has one channel.
NARROW = {
    "_anti_aliased",
    "_depthwise",
    "_with_context",
    "_store_state",
    "_euler_step",
    "frame_phases",
    "excite",
    "synthesise",
}
SINE_BYTES = 40  # stack of the sine of float32, for angles above 10^5
# Tolerated spills of registers, because compilers differ a little. With Triton 3.7.1 a product of
# the vocoder uses 88 bytes of stack on compute capability 10.0. On 9.0 no kernel exceeds 80 bytes.
FEW_BYTES = 56


def check(targets: list[str], models: list[str], folder: Path, *options: str) -> set[str]:
    """Compiles the kernels of models, checks the resources of each, and returns their names."""
    # In a process of its own: in this one kernels are interpreted.
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    script = ["-m", "lab.launches.compile_kernels", *targets]
    command = [sys.executable, *script, *options, *(["--models", *models] if models else [])]
    output = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout
    names = set()
    for line in output.splitlines():
        capability, _, name, storage, _, stack, shared, wide = line.split()
        names.add(name)
        assert int(shared) <= SHARED_BYTES[int(capability)], line
        if storage != "float32":  # float32 pages are only a reference
            assert int(stack) <= FEW_BYTES + SINE_BYTES, line
            assert int(stack) == 0 or (capability, name) != ("80", "_paged_attention"), line
        assert int(wide) > 0 or name in NARROW, line
    return names


def test_kernels_of_cosyvoice3_compile_without_a_gpu(tmp_path: Path) -> None:
    names = check(["90:float16"], ["CosyVoice3"], tmp_path)
    assert {"_project_heads", "_paged_attention", "_multiply_rows"} <= names


@pytest.mark.slow
def test_dependent_launches_compile_without_a_gpu(tmp_path: Path) -> None:
    names = check(["90:float16"], ["CosyVoice3"], tmp_path, "--dependent")
    assert {"_project_heads", "_paged_attention", "_gelu_product", "_gated_norm"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("target", ["80:float16,int8", "90:float16,int8,float8", "100:float16"])
def test_kernels_of_all_models_compile_without_a_gpu(target: str, tmp_path: Path) -> None:
    names = check([target], [], tmp_path)
    assert {"_relative_attention", "_causal_convolution", "_gelu_product"} <= names
    assert {"_with_context", "_anti_aliased", "_window_attention"} <= names
