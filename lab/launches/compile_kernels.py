"""Compiler of every kernel that published models launch, for GPUs that need not be there.

`python -m lab.launches.compile_kernels 80:float16 90:float16,int8 --models CosyVoice3`
compiles for compute capabilities 8.0 and 9.0, and at 9.0 for two ways to keep pages. A model is
assembled on torch's device `meta`, as on a GPU: each function that a GPU would capture as a graph
runs once, and its kernels are compiled instead of launched. So types, constants and tile sizes are
as on a server. A codec has no pages. Its kernels are compiled for each `decoder_precision`.

The program prints a line for each binary: capability, model, kernel, storage (of a codec:
`decoder_precision`), registers of a thread, bytes of its stack, shared memory of a program,
instructions that load 16 bytes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.runtime import driver

from lab.launches.counted_stages import CountedGraphs, counted_stages
from lab.launches.launch_counter import LaunchCounter
from testkit.compile_only import AbsentGPU, compiling
from testkit.models.published_codecs import codec_configs
from testkit.models.sized import public_configs
from token2wav import StreamConfig
from token2wav.config.model_config import ModelConfig
from token2wav.execution.cuda_graphs import CudaGraph
from token2wav.kernels import dependent_launch, products
from token2wav.layers.packed_linear import PARTS

STORAGES = {"float32": "float32", "float16": "auto", "int8": "int8", "float8": "float8"}
# Codecs with signals in both orders, with odd numbers of channels, and with attention whose heads
# share their keys.
CODECS = "SNAC", "NanoCodec", "Audio8"
_WIDE_LOAD = re.compile(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\.cg\S* .*0x10")


class _RunningGraphs(CountedGraphs):
    """Pool that runs a function once in place of its capture."""

    def capture(self, function: Callable[[], None], *, in_steps: bool = False) -> CudaGraph:
        function()
        return super().capture(function)


def binaries(config: ModelConfig, *choices: Any) -> Iterator[Any]:
    """Compiles the kernels of a model for the active GPU, and yields their binaries. `choices` are
    the last arguments of `counted_stages`.
    """
    by_hash: dict[str, Any] = {}
    graphs = patch("lab.launches.counted_stages.CountedGraphs", _RunningGraphs)
    with LaunchCounter() as counter, graphs, compiling(by_hash):
        counted_stages(counter, config, StreamConfig(), *choices)
    yield from by_hash.values()


def resources(cubin: bytes) -> tuple[str, str]:
    """Returns registers of a thread and bytes of its stack, as the disassembler reports them.

    Spilled registers are on the stack.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return registers, stack


def main(arguments: Sequence[str] | None = None) -> None:
    codecs = codec_configs()
    configs = public_configs() | {name: codecs[name] for name in CODECS}
    parser = argparse.ArgumentParser(description="Compile the kernels of published models.")
    parser.add_argument("targets", nargs="+", help="capability and storages, as 90:float16,int8")
    parser.add_argument("--models", nargs="+", choices=configs, default=list(configs))
    parser.add_argument("--dependent", action="store_true", help="with dependent launches")
    options = parser.parse_args(arguments)
    if options.dependent:
        dependent_launch.enable()
        products.cublas_rows = {}
    for target in options.targets:
        capability, _, storages = target.partition(":")
        driver.set_active(AbsentGPU(int(capability)))
        for model in options.models:
            variants: dict[str, tuple[str, ...]] = {
                name: (STORAGES[name],) for name in storages.split(",")
            }
            if model in CODECS:
                variants = {name: ("auto", name) for name in PARTS}
            for storage, choices in variants.items():
                for binary in binaries(configs[model], *choices):
                    wide = len(_WIDE_LOAD.findall(binary.asm["ptx"]))
                    used = resources(binary.asm["cubin"])
                    name, shared = binary.metadata.name, binary.metadata.shared
                    facts = capability, model.replace(" ", ""), name, storage
                    print(*facts, *used, shared, wide, flush=True)


if __name__ == "__main__":
    main()
