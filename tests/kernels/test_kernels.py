"""Every kernel against the same arithmetic in torch, on shapes that fill no tile."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl

from testkit.models.golden import TINY
from testkit.tiles import tiles_of, use_tile
from token2wav import RuntimeConfig, Token2Wav
from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache, Storage
from token2wav.config.settings import DecoderPrecision
from token2wav.execution.block_table import HEADER, Block, frame_positions
from token2wav.families.cosyvoice3 import kernel_step
from token2wav.kernels import products
from token2wav.kernels.norms import NormVectors, added_norm, gated_norm, modulated_norm
from token2wav.kernels.position_convolution import PositionConvolution
from token2wav.kernels.products import gelu_product, project_heads
from token2wav.kernels.rounding import Precision
from token2wav.kernels.tiles import Product, Tile
from token2wav.networks import dit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.usefixtures("fused_products")
# Of values around 1: sums in another order, and on a GPU products of three parts, which no GPU has
# been asked yet.
EXACT = 2e-6 if DEVICE.type == "cpu" else 1e-5
# Tolerance of keys and values that are rounded to the dtype of the store, for a largest value of 1:
# half the widest step between two numbers, or a little more.
STEP = {"float32": 2e-6, "float16": 5e-4, "int8": 4e-3, "float8": 0.04}
# Results of products in float16 are rounded before and after the norms of the heads.
CLOSE = {torch.float32: EXACT, torch.float16: 5e-3}
# Sums run in another order, and GELU is computed before the result is rounded to float16.
OF_PRODUCTS = {torch.float32: 1e-5, torch.float16: 5e-3}
PRODUCTS: dict[str, Product] = {"tanh": "gelu", "none": "gelu_exact"}
DIM_HEAD, BLOCK = 16, 10  # blocks are no multiple of a tile
PAGES = 12


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms(dim: int, dtype: torch.dtype) -> None:
    x, h = 3 * random(2, 3, dim) + 1, random(2, 3, dim).to(dtype)
    gate, shift, scale = (random(dim) for _ in range(3))
    tolerance = EXACT if dtype == torch.float32 else 1e-2
    output = modulated_norm(x, shift, scale, dtype)
    assert output.dtype == dtype
    torch.testing.assert_close(
        output.float(),
        dit.modulated_norm(x, shift[None], scale[None]),
        atol=tolerance,
        rtol=tolerance,
    )
    summed = x + gate * h.float()
    output = gated_norm(x, h, gate, shift, scale)
    torch.testing.assert_close(x, summed, atol=EXACT, rtol=EXACT)
    assert output.dtype == dtype
    torch.testing.assert_close(
        output.float(),
        dit.modulated_norm(summed, shift[None], scale[None]),
        atol=tolerance,
        rtol=tolerance,
    )


def a_norm(channels: int) -> torch.nn.LayerNorm:
    norm = torch.nn.LayerNorm(channels, device=DEVICE).requires_grad_(False)
    norm.weight.copy_(random(channels))
    norm.bias.copy_(random(channels))
    return norm


@pytest.mark.parametrize(
    ("dtype", "tile", "approximate"),
    [
        pytest.param(*case.values, approximate, id=f"{case.id}-{approximate}", marks=case.marks)
        for approximate, product in PRODUCTS.items()
        for case in tiles_of(product)
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter
def test_product_with_gelu(
    dtype: torch.dtype, tile: Tile, approximate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tile(monkeypatch, tile)
    layer = torch.nn.Linear(72, 150, device=DEVICE, dtype=dtype).requires_grad_(False)
    x = 9 * random(3, 47, 72).to(dtype)  # large values, where an exponential overflows
    x[1, 2] = torch.nan  # a row of padding
    output = gelu_product(x, layer, tanh=approximate == "tanh")
    expected = F.gelu(layer(x), approximate=approximate)
    assert output.dtype == dtype
    torch.testing.assert_close(
        output, expected, atol=OF_PRODUCTS[dtype], rtol=OF_PRODUCTS[dtype], equal_nan=True
    )
    assert output.isnan().sum() == 150, "other rows"


@pytest.mark.parametrize(
    "approximate",
    [
        "none",
        pytest.param(
            "tanh",
            marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="cuBLAS computes it on a GPU"),
        ),
    ],
)
def test_product_with_gelu_by_a_library(approximate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cublas_rows", {1: 1})
    monkeypatch.setattr(products, "_EXACT_GELU_ROWS", 1)
    monkeypatch.delattr(tl, "dot")  # no kernel multiplies
    layer = torch.nn.Linear(72, 152, device=DEVICE).half().requires_grad_(False)
    x = 9 * random(3, 48, 72).half()
    output = gelu_product(x, layer, tanh=approximate == "tanh")
    expected = F.gelu(layer(x), approximate=approximate)
    torch.testing.assert_close(output, expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("dtype", OF_PRODUCTS)
def test_sum_and_norm_with_weights(dtype: torch.dtype) -> None:
    norm, x, h = a_norm(80), 3 * random(2, 3, 80) + 1, random(2, 3, 80).to(dtype)
    total = x + h.float()
    output = added_norm(x, h, NormVectors.of(norm))
    assert output.dtype == dtype
    assert torch.equal(x, total)
    torch.testing.assert_close(
        output.float(), norm(x), atol=OF_PRODUCTS[dtype], rtol=OF_PRODUCTS[dtype]
    )


# A chunk of two blocks at the start of its utterance, one block in the middle of another, and a
# chunk that ends with a block that is not full, after a past of which a window shows a part. Then a
# row that stands for no block.
BLOCKS = [
    Block(start=0, valid=BLOCK, before=0, chunk=0, last=False, pages=[7]),
    Block(start=BLOCK, valid=BLOCK, before=BLOCK, chunk=0, last=True, pages=[7, 2]),
    Block(start=3 * BLOCK, valid=BLOCK, before=0, chunk=1, last=True, pages=[9, 4, 0, 11]),
    Block(start=6 * BLOCK, valid=BLOCK, before=0, chunk=2, last=False, pages=[9, 3, 1]),
    Block(start=7 * BLOCK, valid=BLOCK, before=BLOCK, chunk=2, last=False, pages=[9, 1, 8]),
    Block(start=8 * BLOCK, valid=3, before=2 * BLOCK, chunk=2, last=True, pages=[9, 8, 6]),
]
CHUNKS, ROWS = 3, len(BLOCKS) + 1


def a_table() -> torch.Tensor:
    table = torch.full((ROWS, HEADER + 8), 99, dtype=torch.int32)
    table[len(BLOCKS), :HEADER] = 0
    for row, block in zip(table, BLOCKS, strict=False):
        row[: HEADER + len(block.pages)] = torch.tensor(block.row)
    return table.to(DEVICE)


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines of the positions, (ROWS, BLOCK, DIM_HEAD) each."""
    cos, sin = dit.RotaryEmbedding(DIM_HEAD).to(DEVICE)(frame_positions(a_table(), BLOCK))
    return cos, sin


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotates keys (2 * ROWS, BLOCK, inner) by position, and splits the branches."""
    cos, sin = angles()
    return dit.rotate_first_head(x, cos.repeat(2, 1, 1), sin.repeat(2, 1, 1)).unflatten(
        0, (2, ROWS)
    )


def normed(x: torch.Tensor, norm: NormVectors | None) -> torch.Tensor:
    """Normalizes every head of x (..., heads * DIM_HEAD)."""
    if norm is None:
        return x
    heads = x.unflatten(-1, (-1, DIM_HEAD))
    return F.layer_norm(heads, (DIM_HEAD,), 1 + norm.scale, norm.shift, norm.epsilon).flatten(-2)


@pytest.mark.parametrize(("dtype", "tile"), tiles_of("heads"))
def test_every_tile_of_the_heads(
    dtype: torch.dtype, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tile(monkeypatch, tile)
    check_heads("float32", 8, dtype, bias=True, norms=True)


@pytest.mark.parametrize("storage", ["float32", "float16", "int8", "float8"])
@pytest.mark.parametrize(("heads", "bias", "norms"), [(3, True, False), (4, False, True)])
def test_projected_keys_and_values_in_pages(
    storage: Storage, heads: int, bias: bool, norms: bool
) -> None:
    check_heads(storage, heads, torch.float32, bias=bias, norms=norms)


@pytest.mark.parametrize("storage", ["float16", "int8", "float8"])
@pytest.mark.parametrize(("heads", "bias", "norms"), [(3, True, False), (4, False, True)])
def test_products_of_a_library_in_pages(
    storage: Storage, heads: int, bias: bool, norms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "cublas_rows", {40: 2 * ROWS * BLOCK})
    monkeypatch.delattr(tl, "dot")  # the kernel multiplies nothing
    check_heads(storage, heads, torch.float16, bias=bias, norms=norms)


def check_heads(
    storage: Storage, heads: int, dtype: torch.dtype, *, bias: bool, norms: bool
) -> None:
    """Compares queries, keys and values with torch. Frames that are not valid hold NaN."""
    inner, inputs, step = heads * DIM_HEAD, 40, max(STEP[storage], CLOSE[dtype])
    cache = PagedKVCache(CacheLayout(1, 1, heads, DIM_HEAD, BLOCK, storage), PAGES, DEVICE)
    view = cache.layer(0, 0)
    view.data.fill_(72)
    x = random(2 * ROWS, BLOCK, inputs).to(dtype)
    for row, block in enumerate(BLOCKS):
        x[row::ROWS, block.valid :] = torch.nan
    layer = torch.nn.Linear(inputs, 3 * inner, bias=bias, device=DEVICE).requires_grad_(False)
    layer.weight.mul_(4)  # values around 2
    layer.to(dtype)
    query_norm, key_norm = (
        NormVectors(random(DIM_HEAD), random(DIM_HEAD), 1e-5) if norms else None for _ in range(2)
    )
    of_heads = (query_norm, key_norm) if query_norm and key_norm else None
    weights = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    queries = project_heads(x, weights, view, *angles(), a_table(), of_heads)
    q, k, v = layer.float()(x.float()).chunk(3, dim=2)
    torch.testing.assert_close(
        queries.float(), normed(q, query_norm), atol=CLOSE[dtype], rtol=CLOSE[dtype], equal_nan=True
    )
    keys, values = rotated(normed(k, key_norm)), v.unflatten(0, (2, ROWS))
    for row, block in enumerate(BLOCKS):
        page = view.read(cache.index(block.pages[-1:]), block.valid)
        for expected, rows in zip((keys, values), page, strict=True):
            expected = expected[:, row, : block.valid]
            assert (rows - expected).abs().max() <= step * float(expected.abs().max())
        rest = view.data[:, :, block.pages[-1], block.valid :].float()
        assert (rest == 72).all(), "the rest of a block"
        if storage == "float8":
            assert view.scales is not None
            largest = keys[:, row, : block.valid].unflatten(2, (heads, DIM_HEAD)).abs()
            of_page = view.scales[0, :, block.pages[-1], 0]
            torch.testing.assert_close(of_page, largest.amax((1, 3)) / 448)
    untouched = sorted(set(range(PAGES)) - {block.pages[-1] for block in BLOCKS})
    assert (view.data[:, :, untouched].float() == 72).all()


@pytest.mark.parametrize(
    ("width", "precision"),
    [
        (3, "tf32x3"),
        (3, "float16"),
        pytest.param(16, "tf32x3", marks=pytest.mark.slow),
        pytest.param(16, "float16", marks=pytest.mark.slow),
    ],
)
def test_position_convolution(width: int, precision: Precision) -> None:
    groups, taps = 4, 31  # more than two blocks, so that a block looks back on several
    conv = torch.nn.Conv1d(
        groups * width, groups * width, taps, groups=groups, device=DEVICE
    ).requires_grad_(False)
    conv.weight.mul_(3)
    x = 4 * random(2 * ROWS, BLOCK, groups * width)
    # As it lies in a batch: of one ODE step and one of two convolutions, with room for one more
    # chunk.
    state = random(CHUNKS + 1, 3, 2, 2, taps - 1, groups * width)[:, 1, 1].transpose(-1, -2)
    before = state.clone()
    output = PositionConvolution(conv, precision)(x, state, a_table()).unflatten(0, (2, ROWS))
    operands = torch.float16 if precision == "float16" else torch.float32
    conv.weight.copy_(conv.weight.to(operands))
    for chunk in range(CHUNKS):
        rows = [(row, block) for row, block in enumerate(BLOCKS) if block.chunk == chunk]
        frames = torch.cat(
            [x.unflatten(0, (2, ROWS))[:, row, : block.valid] for row, block in rows], dim=1
        )
        extended = torch.cat((before[chunk], frames.transpose(1, 2)), dim=2)
        expected = F.mish(conv(extended.to(operands).float())).transpose(1, 2)
        result = torch.cat([output[:, row, : block.valid] for row, block in rows], dim=1)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(state[chunk], extended[:, :, -(taps - 1) :])
    assert torch.equal(state[CHUNKS], before[CHUNKS]), "a chunk that is not there"


def test_position_convolution_beyond_the_range_of_float16() -> None:
    """Operands become its largest number, also in the state, and NaN stays NaN."""
    channels, taps, most = 2, 31, torch.finfo(torch.float16).max
    conv = torch.nn.Conv1d(channels, channels, taps, groups=channels, device=DEVICE)
    conv.requires_grad_(False).weight.zero_()
    conv.bias.zero_()  # type: ignore[union-attr]
    conv.weight[0, 0, -1], conv.weight[1, 0, 0] = 1, 1e6
    x = torch.ones(2 * ROWS, BLOCK, channels, device=DEVICE)
    x[0, :4, 0] = torch.tensor([1e6, most, -1e6, torch.nan], device=DEVICE)
    state = torch.full((CHUNKS, 2, taps - 1, channels), 1e6, device=DEVICE).transpose(-1, -2)
    output = PositionConvolution(conv, "float16")(x, state, a_table())
    expected = torch.tensor([most, most, 0, torch.nan], device=DEVICE)
    torch.testing.assert_close(output[0, :4, 0], expected, equal_nan=True)
    assert (output[0, :BLOCK, 1] == most**2).all()


@pytest.mark.parametrize(
    ("precision", "decoder_precision", "inputs"),
    [
        ("float32", "float16", "tf32x3"),
        ("float16", "float32", "tf32"),
        ("float16", "float16", "float16"),
    ],
)
def test_settings_choose_the_inputs_of_position_convolutions(
    precision: Literal["float32", "float16"],
    decoder_precision: DecoderPrecision,
    inputs: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = []
    monkeypatch.setattr(
        kernel_step, "PositionConvolution", lambda conv, precision: chosen.append(precision)
    )
    runtime = RuntimeConfig("cpu", precision=precision, decoder_precision=decoder_precision)
    flow: Any = Token2Wav.load(TINY, runtime=runtime).pipeline.flow
    [runner] = flow._runners.values()
    step: Any = runner.step
    kernel_step.CosyVoice3KernelStep(step.estimator, step.tables, step.cache)
    assert chosen == [inputs, inputs]
