"""Compiles every kernel for a GPU that need not be there, at the public model's size.

`python compile_kernels.py 90 float16 int8` does so for compute capability 9.0 and two ways to keep pages.

Prints a line for each: its name, how pages are kept, registers of a thread, bytes that it spills, shared memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from token2wav.kernels import attention, cache_writes, norms, position_convolution

# Types of arguments: those that depend on how pages are kept, and the others that are no int32.
STORAGE = {
    "float32": {"data": "*fp32", "scales": "constexpr", "weights": "*fp32"},
    "float16": {"data": "*fp16", "scales": "constexpr", "weights": "*fp16"},
    "int8": {"data": "*i8", "scales": "*fp32", "weights": "*fp16"},
}
KINDS = {"keys": "data", "values": "data", "key_scales": "scales", "value_scales": "scales"} | dict.fromkeys(
    ("h", "qkv", "out"), "weights"
)
FLOAT32 = ("x", "gate", "shift", "scale", "cos", "sin", "weights", "bias", "contexts", "before", "after")

PAGES = {"BLOCK_FRAMES": 50, "HEADS": 16, "HEADS_UP": 16, "DIM": 64}
ROW = {"WIDTH": 1024}
GROUPS = {"TAPS": 31, "TAPS_UP": 32, "GROUPS": 16, "WIDTH": 64, "WIDTH_UP": 64, "TILE": position_convolution._TILE}
ATTENTION = {"num_warps": attention._WARPS, "num_stages": attention._STAGES}
CONVOLUTION = {"num_warps": position_convolution._WARPS, "num_stages": position_convolution._STAGES}

Job = tuple[Any, str, dict[str, int], dict[str, int]]  # kernel, storage, constants, options


def jobs(storages: list[str]) -> Iterator[Job]:
    for storage in storages:
        yield norms._modulated_norm, storage, ROW, {}
        yield norms._gated_norm, storage, ROW, {}
        yield cache_writes._store_keys_values, storage, PAGES, {}
        for queries in (attention._FEW_QUERIES, attention._QUERIES):
            tile = {"QUERIES": queries, "KEYS": attention._KEYS}
            yield attention._paged_attention, storage, PAGES | tile, ATTENTION
    yield position_convolution._convolve, "any", GROUPS, CONVOLUTION
    yield position_convolution._keep, "any", GROUPS | {"WIDTH": position_convolution._TILE}, {}


def types_of(kernel: Any, storage: str, constants: dict[str, int]) -> dict[str, str]:
    """Of a kernel's arguments, by their names."""
    types = dict.fromkeys(FLOAT32, "*fp32") | {"table": "*i32"}
    types |= {name: STORAGE.get(storage, STORAGE["float32"])[kind] for name, kind in KINDS.items()}
    found = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    if kernel is attention._paged_attention:
        found["scale"] = "fp32"  # of the scores
    return found


def resources(cubin: bytes) -> tuple[str, str]:
    """Registers of a thread and bytes of its stack, where spilled ones go, as the disassembler says."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return registers, stack


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for kernel, storage, sizes, options in jobs(sys.argv[2:]):
        types = types_of(kernel, storage, sizes)
        constants = {name: sizes.get(name) for name, kind in types.items() if kind == "constexpr"}  # None: no scales
        source = ASTSource(kernel, signature=types, constexprs=constants)
        compiled = triton.compile(source, target=target, options=options)
        print(kernel.__name__, storage, *resources(compiled.asm["cubin"]), compiled.metadata.shared)


if __name__ == "__main__":
    main()
