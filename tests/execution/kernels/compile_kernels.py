"""Compiler of every kernel for a GPU that need not be there, at the public model's size.

`python compile_kernels.py 80:float16 90:float16,int8` compiles for compute capabilities 8.0 and
9.0, and at 9.0 for two ways to keep pages. It calls the kernels as batches of several sizes do, so
types, constants and alignments are the same as on a machine that runs the server. It prints a line
for each binary: capability, kernel, storage, registers of a thread, bytes that it spills, shared
memory of a program, instructions that load 16 bytes.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache
from token2wav.execution.assemble import flow_networks
from token2wav.execution.batch import HEADER
from token2wav.execution.channels_last import HiFTPlan
from token2wav.execution.kernels.attention import paged_attention
from token2wav.execution.kernels.causal_convolution import CausalConvolution, NormedConvolution
from token2wav.execution.kernels.convolution import PieceTensors
from token2wav.execution.kernels.euler import integrate
from token2wav.execution.kernels.norms import (
    NormVectors,
    added_norm,
    gated_norm,
    modulated_norm,
)
from token2wav.execution.kernels.position_convolution import PositionConvolution
from token2wav.execution.kernels.products import gelu_product, project_heads
from token2wav.execution.kernels.relative_attention import relative_attention
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.networks.hift import HiFT
from token2wav.networks.ode import OdeTables
from token2wav.networks.unet import CausalConv

MODEL = CosyVoice3Config.read(Path(__file__).parents[2] / "data" / "full_size")
CONFIG = MODEL.flow.estimator
TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.float16,
    "float8": torch.float16,
}
_PRECISIONS = ("float32", "float16")
FRAMES = CONFIG.static_chunk_size
# Channels of the U-Net of CosyVoice2 and of the DiT of Step-Audio2, and inputs of convolutions.
CHANNELS = {256: (256, 320, 512), 512: (512,)}
# Blocks of batches: a compiler may specialise binaries for 1 and for multiples of 16. Attention has
# a tile for each of 3, 8 and 16 blocks.
BATCHES = (1, 3, 8, 16)
_WIDE_LOAD = re.compile(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\.cg\S* .*0x10")


class AbsentGPU:
    """Driver of an absent GPU of some compute capability, sufficient for compiling."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._capability  # kernels keep their binaries by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(work: Callable[[], None]) -> Iterator[Any]:
    """Yields the binaries of a function's kernel launches without launching them."""
    found: dict[str, Any] = {}

    def take(kernel: JITFunction[Any], grid: object) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            binary = kernel.run(*arguments, grid=grid, warmup=True, **options)
            found[binary.hash] = binary

        return launch

    before, JITFunction.__getitem__ = JITFunction.__getitem__, take
    try:
        work()
    finally:
        JITFunction.__getitem__ = before
    yield from found.values()


def on_pages(storage: str) -> None:
    """Calls the kernels with types that depend on the storage of pages."""
    layout = CacheLayout(1, 1, CONFIG.heads, CONFIG.dim_head, FRAMES, storage)  # type: ignore[arg-type]
    for blocks in BATCHES:
        view = PagedKVCache(layout, 10 + blocks, torch.device("cpu")).layer(0, 0)
        kind, table = TYPES[storage], a_table(blocks)
        cos, sin = (torch.zeros(blocks, FRAMES, CONFIG.dim_head) for _ in range(2))
        linear = torch.nn.Linear(CONFIG.dim, 3 * CONFIG.heads * CONFIG.dim_head, dtype=kind)
        projections = linear.weight.detach(), linear.bias.detach()
        x = torch.zeros(2 * blocks, FRAMES, CONFIG.dim, dtype=kind)
        norm = NormVectors.of(torch.nn.LayerNorm(CONFIG.dim_head))
        project_heads(x, projections, view, cos, sin, table, (norm, norm))
        queries = project_heads(x, projections, view, cos, sin, table)
        paged_attention(queries, view, cos, sin, table)
        x, gate = torch.zeros(2 * blocks, FRAMES, CONFIG.dim), torch.zeros(CONFIG.dim)
        gated_norm(x, modulated_norm(x, gate, gate, kind), gate, gate, gate)


@cache
def state_layout() -> CacheLayout:
    """Returns the layout of the flow's states, of one step."""
    with torch.device("meta"):
        return dataclasses.replace(flow_networks(MODEL, "float32").layout, steps=1)


def on_positions() -> None:
    """Calls the kernels that work in float32 for every storage of pages."""
    conv = torch.nn.Conv1d(CONFIG.dim, CONFIG.dim, 31, groups=16).requires_grad_(False)
    layout = state_layout()
    for blocks in BATCHES:
        states = torch.zeros(blocks, *layout.conv_state).view(blocks, 2, 2, CONFIG.dim, 30)
        state = states[:, :, 1]
        x = torch.zeros(2 * blocks, FRAMES, CONFIG.dim)
        PositionConvolution(conv)(x, state, a_table(blocks))


def on_encoder() -> None:
    """Calls attention of the conformer encoder, at the token rate and at the frame rate."""
    size, heads = 512, 8  # of public CosyVoice2
    for rate in (1, 2):
        layout = CacheLayout(1, 1, 1, size, rate * MODEL.block_tokens, branches=1)
        for blocks in BATCHES:
            view = PagedKVCache(layout, 10 + blocks, torch.device("cpu")).layer(0, 0)
            queries = torch.zeros(blocks, layout.block_frames, size)
            by_position = torch.zeros(heads, *queries.shape)
            bias, sinusoids = torch.zeros(heads, size // heads), view.data[0, 0]
            relative_attention(queries, by_position, bias, view, sinusoids, a_table(blocks), rate)


def on_products(storage: str) -> None:
    """Calls the kernels of a U-Net and of Step-Audio2 with the dtype of their weights."""
    kind = TYPES[storage]
    for channels in CHANNELS:
        linear = torch.nn.Linear(channels, 4 * channels, dtype=kind).requires_grad_(False)
        vectors = NormVectors.of(torch.nn.LayerNorm(channels))
        for blocks in BATCHES:
            x = torch.zeros(2 * blocks, FRAMES, channels)
            h = added_norm(x, x.to(kind), vectors)
            gelu_product(h, linear, tanh=channels == 512)


def on_states() -> None:
    """Calls Euler steps with the product of the state, and with its copy."""
    bands = CONFIG.mel_dim
    tables = OdeTables([0.5, 0.5], [], 0.7, [0, 1])
    weight = torch.zeros(CONFIG.dim, 4 * bands)[:, :bands]
    for blocks in BATCHES:
        x = torch.zeros(blocks, bands, FRAMES)
        # Only the dtypes of velocities matter here.
        given = torch.zeros(2, blocks, FRAMES, CONFIG.dim)
        integrate(x, tables, given, weight, lambda step, h: h[0, ..., :bands].half().contiguous())
        given = torch.zeros(2, blocks, FRAMES, 4 * bands)
        integrate(x, tables, given, None, lambda step, h: h[0, ..., :bands].contiguous())


def on_convolutions() -> None:
    """Calls the kernels of causal convolutions."""
    for channels, all_inputs in CHANNELS.items():
        norm = torch.nn.LayerNorm(channels).requires_grad_(False)
        vectors = NormVectors.of(norm)
        for inputs, blocks in product(all_inputs, BATCHES):
            conv = CausalConv(inputs, channels).requires_grad_(False)
            state = torch.zeros(blocks, 10, 2, inputs, 2)[:, 1]
            past: Any = SimpleNamespace(table=a_table(blocks), states=[state])
            x = torch.zeros(2 * blocks, FRAMES, inputs)
            CausalConvolution(conv)(x, past)
            total, gate = torch.zeros(2 * blocks, FRAMES, channels), vectors.shift
            CausalConvolution(conv).add_gated(x, past, total, gate, vectors, torch.float16)
            out = NormedConvolution(conv, norm)(x, past, vectors.shift)
            NormedConvolution(conv, norm)(x, past)
            NormedConvolution(conv, norm).with_residual(x, past, out, vectors, torch.float16)


@cache
def hift_networks() -> list[HiFT]:
    """Returns both kinds of HiFT, without weights."""
    configs = [
        dataclasses.replace(MODEL.vocoder, causal=causal, conv_pre_look_right=4 - (not causal))
        for causal in (True, False)
    ]
    with torch.device("meta"):
        networks = [HiFT(config) for config in configs]
        for network in networks:
            network.freeze()
    return networks


def on_mels() -> None:
    """Calls the kernels of the vocoder."""
    for network in hift_networks():
        with torch.device("meta"):
            plan = HiFTPlan(network)
            for streams in BATCHES:
                frames, samples = 50 + network.lookahead_frames, network.frame_samples
                states = {
                    spec.dtype: torch.zeros(streams, *spec.shape, dtype=spec.dtype)
                    for spec in plan.state_specs().values()
                }
                pieces = torch.zeros(streams, 4, dtype=torch.int32)
                batch = PieceTensors(frames, pieces, states, states)
                mel = torch.zeros(network.bands, streams * frames)
                plan.step(batch, mel, torch.zeros(streams, (1 + frames) * samples))


def a_table(blocks: int) -> torch.Tensor:
    return torch.zeros(blocks, HEADER + 512 + blocks, dtype=torch.int32)


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


def main() -> None:
    for argument in sys.argv[1:]:
        capability, _, storages = argument.partition(":")
        driver.set_active(AbsentGPU(int(capability)))
        compile_all(capability, storages.split(","))


def compile_all(capability: str, storages: list[str]) -> None:
    """Compiles every kernel for the active GPU, and prints a line for each binary."""
    works: list[tuple[str, Callable[[], None]]] = [
        *((storage, partial(on_pages, storage)) for storage in storages),
        *(
            (storage, partial(on_products, storage))
            for storage in storages
            if storage in _PRECISIONS
        ),
        ("any", on_positions),
        ("any", on_convolutions),
        ("any", on_states),
        ("encoder", on_encoder),
        ("mel", on_mels),
    ]
    for storage, work in works:
        for binary in compiled(work):
            wide = len(_WIDE_LOAD.findall(binary.asm["ptx"]))
            print(
                capability,
                binary.metadata.name,
                storage,
                *resources(binary.asm["cubin"]),
                binary.metadata.shared,
                wide,
            )


if __name__ == "__main__":
    main()
