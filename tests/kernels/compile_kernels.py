"""Compiles every kernel for a GPU that need not be there, at the public model's size: `python compile_kernels.py 90`.

Prints a line for each: its name, how pages are kept, registers of a thread, bytes that it spills, shared memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from token2wav.kernels import attention, cache_writes, norms

SIZES = {"BLOCK_FRAMES": 50, "HEADS": 16, "HEADS_UP": 16, "DIM": 64, "WIDTH": 1024, "QUERIES": 0, "KEYS": 0}
# How pages are kept: pointers to keys and values, and to their scales.
STORAGE = {"float32": ("*fp32", "constexpr"), "float16": ("*fp16", "constexpr"), "int8": ("*i8", "*fp32")}
FLOAT32 = {"x", "gate", "shift", "scale", "cos", "sin"}


def signature(kernel: Any, storage: str) -> dict[str, str]:
    """Types of a kernel's arguments, by their names."""
    data, scales = STORAGE[storage]
    weights = "*fp32" if storage == "float32" else "*fp16"
    types = {"keys": data, "values": data, "key_scales": scales, "value_scales": scales, "table": "*i32"}
    types |= dict.fromkeys(("h", "qkv", "out"), weights) | dict.fromkeys(FLOAT32, "*fp32")
    types |= dict.fromkeys(SIZES, "constexpr")
    found = {name: types.get(name, "i32") for name in kernel.arg_names}
    if "left_blocks" in found:
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
    plain = [norms._modulated_norm, norms._gated_norm, cache_writes._store_keys_values]
    tiles = [(attention._paged_attention, queries) for queries in (attention._FEW_QUERIES, attention._QUERIES)]
    for storage in STORAGE:
        for kernel, queries in [*((kernel, 0) for kernel in plain), *tiles]:
            types = signature(kernel, storage)
            sizes = SIZES | {"QUERIES": queries, "KEYS": attention._KEYS}
            constants = {name: sizes.get(name) for name, kind in types.items() if kind == "constexpr"}
            options = {"num_warps": attention._WARPS, "num_stages": attention._STAGES} if queries else {}
            source = ASTSource(kernel, signature=types, constexprs=constants)
            compiled = triton.compile(source, target=target, options=options)
            print(kernel.__name__, storage, *resources(compiled.asm["cubin"]), compiled.metadata.shared)


if __name__ == "__main__":
    main()
