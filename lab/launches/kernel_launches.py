"""Launches of the kernels of the Triton language: bytes, operations and expected times, from the
arguments of a launch and from the tables that were copied from the host.

A table of blocks or of pieces says which part of a batch holds data. A batch has room for more, but
programs without data return at once. So only blocks and pieces that exist are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray

from lab.launches.launch import Launch, Record
from token2wav.execution.block_table import HEADER, Column
from token2wav.kernels.tiles import (
    MULTIPROCESSORS,
    Product,
    ProductSize,
    Tile,
    fitted,
    table,
)

# The number of pages is prime, so a tensor with an axis of this length holds pages of the cache.
ALL_PAGES = 10_007
# Arguments for the states of whole streams, of which a launch reads and writes a small part.
_HALOS = "old", "new", "exact_old", "exact_new"
# Arguments of kernels on pieces that do not grow with the pieces.
_SHARED = "weights", "bias", "geometry", "slopes", "kernels", "merge", "gains", "begins", "pieces"
_PIECE_FRAMES, _TAPS = 1, 0  # columns of the table of pieces, and of a geometry
# Reads of attention that wait for one another before and after the loop, and in each iteration. On
# an H200 a launch with splits takes 9.0, 9.8 and 19.6 us for 1, 4 and 9 iterations, which is 7 us
# and 1.4 us for each, within 30 %. Attention with relative positions has another kernel, which has
# not been measured; these are the figures of an earlier kernel like it.
_READS_BEFORE, _READS_OF_ITERATION = 15, 4.6
_READS_BEFORE_RELATIVE, _READS_OF_RELATIVE_ITERATION = 8, 3.4

# Names of products in the table of tiles, by kernel.
_PRODUCTS: dict[str, Product | None] = {
    "_project_heads": "heads",
    "_gelu_product": "gelu",
    "_causal_convolution": "convolution",
    "_multiply_rows": "vocoder",
    "_convolve": None,
}

Contents = Callable[[torch.Tensor], NDArray[Any] | None]


def tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    """Lists the tensors among values and in their lists."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_of(value)
    return tensors


def bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of the numbers of a tensor; numbers that are repeated count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def kernel_record(name: str, arguments: Mapping[str, Any], contents: Contents) -> Record:
    """Returns the record of a launch.

    Args:
        arguments: its arguments, with the sizes of its tile.
        contents: returns the integers of a tensor that was copied from the host, else None.
    """
    # A tensor that is two arguments, such as a sum that replaces a summand, counts once.
    tensors = {
        id(value): value
        for key, value in arguments.items()
        if isinstance(value, torch.Tensor) and key not in _HALOS
    }
    kernel = _Kernel(name, arguments, list(tensors.values()), contents)
    if name == "_window_attention":
        return kernel.on_rings()
    if any(ALL_PAGES in tensor.shape for tensor in kernel.tensors):
        return kernel.on_pages
    return kernel.on_pieces if "pieces" in arguments else kernel.plain()


@dataclass(frozen=True, eq=False)
class _Kernel:
    """Launch of a kernel, before the contents of its tables are known."""

    name: str
    arguments: Mapping[str, Any]
    tensors: list[torch.Tensor]
    contents: Contents

    def plain(self) -> Launch:
        """Returns the launch of a kernel that computes the whole of its tensors."""
        arguments, size = self.arguments, self._product()
        operations, kind = 0.0, "float32"
        if size is not None:
            operations = 2.0 * size.copies * size.rows * size.outputs * size.inputs
            operations, kind = _on_matrix_units(operations, size.dtype)
            if arguments.get("PRECISION") == "tf32":
                operations /= 3  # one product instead of three
        elif self.name == "_euler_step" and arguments["weight"] is not None:
            frames = arguments["x"].numel() // arguments["BANDS"]
            operations, kind = _on_matrix_units(2.0 * frames * arguments["weight"].numel())
        total = sum(map(bytes_of, self.tensors))
        return Launch(self.name, total, operations, kind, self._product_us(size))

    def on_pages(self) -> Launch:
        """Returns the launch of a kernel that reads or writes pages of the cache."""
        arguments, attention = self.arguments, "attention" in self.name
        plain = sum(bytes_of(tensor) for tensor in self.tensors if ALL_PAGES not in tensor.shape)
        paged = [tensor for tensor in self.tensors if ALL_PAGES in tensor.shape]
        rows = self._block_table()
        if rows is None:
            return Launch(self.name, plain, attention=attention, complete=False)
        page_bytes = sum(bytes_of(tensor) / ALL_PAGES for tensor in paged)
        half = any(tensor.dtype == torch.float16 for tensor in self.tensors)
        dtype = torch.float16 if half else torch.float32
        if not attention:
            size, operations = self._product(), 0.0
            if size is not None:
                operations = 2.0 * size.rows * size.outputs * size.inputs
            # only the page of the block itself is written
            total = plain + len(rows) * page_bytes
            computed = _on_matrix_units(operations, dtype)
            return Launch(self.name, total, *computed, self._product_us(size))
        relative = "relative" in self.name
        rate = arguments.get("RATE", 1)  # positions for each unit of the table
        branches, _, positions, heads, dim_head = paged[0].shape
        pairs = _pairs(rows, positions // rate) * rate * rate
        operations = 4.0 * branches * heads * dim_head * pairs
        if relative:  # every head multiplies with whole sinusoids too; the cache has one wide head
            heads = arguments["HEADS"]
            operations += 2.0 * heads * dim_head * pairs
        return Launch(
            self.name,
            plain + len(_pages(rows)) * page_bytes,
            *_on_matrix_units(operations, dtype),
            self._attention_us(rows, page_bytes, positions, branches * heads),
            attention=True,
        )

    def on_rings(self) -> Launch:
        """Returns the launch of attention over rings, of streams that fill their windows."""
        arguments, rings = self.arguments, self.arguments["rings"]
        streams, count, window = (
            len(arguments["offsets"]),
            arguments["count"],
            arguments["window"],
        )
        plain = sum(bytes_of(tensor) for tensor in self.tensors if tensor is not rings)
        # keys and values of a window are read, those of the part are written
        of_rings = streams * (window - 1 + count) * bytes_of(rings) / arguments["ring"]
        queries = arguments["queries"]
        operations = 4.0 * queries.numel() / arguments["times"] * count * window
        iterations = 1 + -(-(window - 1) // arguments["KEYS"])
        waits = _READS_BEFORE_RELATIVE + iterations * _READS_OF_RELATIVE_ITERATION / (
            arguments["num_stages"] - 1
        )
        return Launch(
            self.name,
            plain * count / arguments["times"] + of_rings,
            *_on_matrix_units(operations),
            waits * table().rates.latency_us,
            attention=True,
        )

    def on_pieces(self) -> Launch:
        """Returns the launch of a vocoder kernel, which computes pieces of streams."""
        pieces = self.contents(self.arguments["pieces"])
        if pieces is None:
            return Launch(self.name, sum(map(bytes_of, self.tensors)), complete=False)
        frames = [int(count) for count in pieces[:, _PIECE_FRAMES] if count > 0]
        share = min(1.0, sum(frames) / (len(pieces) * self._room()))
        total = sum(
            bytes_of(tensor) * (1.0 if self._is_shared(tensor) else share)
            for tensor in self.tensors
        )
        if self.name != "_multiply_rows" or not frames:
            return Launch(self.name, total)
        return self._multiplied_rows(frames, total)

    def _multiplied_rows(self, frames: Sequence[int], total_bytes: float) -> Launch:
        """Returns the launch of a convolution of parallel branches.

        Args:
            frames: frames of each piece.
            total_bytes: bytes of all tensors. The weights of branches with few taps are padded.
        """
        arguments, weights = self.arguments, self.arguments["weights"]
        branches, outputs, width = weights.shape
        geometry = self.contents(arguments["geometry"])
        widths = [width] if geometry is None else geometry[:, _TAPS] * arguments["channels"]
        inputs = math.ceil(sum(map(int, widths)) / len(widths))
        rows = arguments["rate"] * sum(frames)
        operations = 2.0 * branches * rows * outputs * inputs
        if weights.dtype == torch.float64:
            computed = operations, "float64"
        else:
            computed = operations * (3 if arguments["PRECISION"] == "tf32x3" else 1), "tf32"
        copies = branches * len(frames)
        size = ProductSize(-(-rows // len(frames)), outputs, inputs, weights.dtype, copies)
        padding = bytes_of(weights) * (1 - inputs / width)
        return Launch(self.name, total_bytes - padding, *computed, self._product_us(size))

    def _product(self) -> ProductSize | None:
        """Returns the size of the matrix product that the kernel computes; None for none."""
        arguments = self.arguments
        if self.name in ("_gelu_product", "_project_heads"):
            if arguments["weight"] is None:  # a library has multiplied
                return None
            outputs, inputs = arguments["weight"].shape
            return ProductSize(arguments["rows"], outputs, inputs, arguments["weight"].dtype)
        if self.name == "_causal_convolution":
            taps, outputs, inputs = arguments["weights"].shape
            rows = arguments["out"].numel() // outputs
            return ProductSize(rows, outputs, taps * inputs, arguments["weights"].dtype)
        if self.name == "_convolve":
            taps, groups, outputs, inputs = arguments["weights"].shape
            frames, dtype = arguments["BLOCK_FRAMES"], arguments["weights"].dtype
            blocks = arguments["out"].numel() // (frames * groups * outputs)
            return ProductSize(frames, outputs, taps * inputs, dtype, groups * blocks)
        return None

    def _product_us(self, size: ProductSize | None) -> float:
        """Returns the expected time of the reads of a product, by the rule that chooses tiles."""
        if size is None:
            return 0.0
        kind, tile = self._tile()
        # If a GPU has measured the tile, its ratio is in the table.
        for variant in table().variants(kind, size.dtype) if kind else ():
            if replace(fitted(variant, size.outputs), ratios=()) == tile:
                return table().expected_us(replace(tile, ratios=variant.ratios), size)
        return table().expected_us(tile, size)

    def _tile(self) -> tuple[Product | None, Tile]:
        """Returns the tile of a product, and the product's name in the table of tiles."""
        arguments, kind = self.arguments, _PRODUCTS[self.name]
        if self.name == "_gelu_product" and not arguments["TANH"]:
            kind = "gelu_exact"
        if self.name == "_multiply_rows":
            sizes = [arguments[f"TILE_{name}"] for name in ("ROWS", "OUTPUTS", "INPUTS")]
        elif self.name == "_convolve":
            sizes = [arguments["TILE"], arguments["WIDTH_UP"], arguments["WIDTH_UP"]]
        elif self.name == "_project_heads":
            outputs = arguments["HEADS_OF_TILE"] * arguments["DIM"]
            sizes = [arguments["ROWS_OF_TILE"], outputs, arguments["INPUTS_OF_TILE"]]
            kind = None if arguments["BY_BLOCK"] else kind
        else:
            sizes = [arguments[f"{name}_OF_TILE"] for name in ("ROWS", "OUTPUTS", "INPUTS")]
        rows, outputs, inputs = sizes
        return kind, Tile(rows, outputs, inputs, arguments["num_warps"], arguments["num_stages"])

    def _attention_us(
        self, rows: NDArray[Any], page_bytes: float, positions: int, heads: int
    ) -> float:
        """Returns the expected time of the reads of attention.

        A program computes a tile of queries of one head. It reads all keys that they attend to.
        """
        arguments, relative = self.arguments, "relative" in self.name
        rate, rates = arguments.get("RATE", 1), table().rates
        counts = -(-rate * rows[:, Column.VALID] // arguments["QUERIES"])
        pages = rows[:, Column.NUM_PAGES]
        tiles, read, most = int(counts.sum()), int((counts * pages).sum()), int(pages.max())
        if relative:  # each head reads the sinusoids of all heads
            keys_and_values = 2 * positions * heads * arguments["DIM"] * 4
            page_bytes = keys_and_values + heads * (page_bytes - keys_and_values)
        programs = tiles * heads
        if relative:
            iterations = -(-most * positions // arguments["KEYS"])
            before, serial = _READS_BEFORE_RELATIVE, _READS_OF_RELATIVE_ITERATION + heads
        else:  # an iteration is a page for each split
            iterations = -(-most // arguments["SPLITS"])
            before, serial = _READS_BEFORE, _READS_OF_ITERATION
        waits = before + iterations * serial / (arguments["num_stages"] - 1)
        return max(
            read * page_bytes / rates.l2_bytes_per_us,
            -(-programs // MULTIPROCESSORS) * read * page_bytes / programs / rates.sm_bytes_per_us,
            waits * rates.latency_us,
        )

    def _block_table(self) -> NDArray[Any] | None:
        """Returns the rows of the block table that hold blocks; None if they are not known."""
        integers = [tensor for tensor in self.tensors if tensor.dtype == torch.int32]
        for rows in map(self.contents, integers):
            if rows is not None and rows.ndim == 2 and rows.shape[1] > HEADER:
                return rows[rows[:, Column.VALID] > 0].astype(int)
        return None

    def _room(self) -> int:
        """Returns the frames that a piece of the batch has room for."""
        arguments = self.arguments
        if "frame_limit" in arguments:
            return int(arguments["frame_limit"])
        signal, name = (
            (arguments["out"], "out")
            if arguments.get("out") is not None
            else (
                arguments["raw"],
                "raw",
            )
        )
        halo = arguments[f"{name}_halo"] // signal.shape[-1]
        rate = arguments.get("rate", 1) * arguments.get("PHASES", 1)
        return max(1, (signal.shape[2] - halo) // rate)

    def _is_shared(self, tensor: torch.Tensor) -> bool:
        return any(self.arguments.get(name) is tensor for name in _SHARED)


def _on_matrix_units(operations: float, dtype: torch.dtype = torch.float32) -> tuple[float, str]:
    """Returns operations and their kind. Products of float32 are made of three TF32 products, which
    together keep its precision.
    """
    return (operations, "float16") if dtype == torch.float16 else (3 * operations, "tf32")


def _pairs(rows: NDArray[Any], block_frames: int) -> int:
    """Counts the pairs of query and key of blocks."""
    keys = (
        (rows[:, Column.NUM_PAGES] - 1) * block_frames
        + rows[:, Column.VALID]
        - rows[:, Column.PROMPT_PADDING]
    )
    return int((rows[:, Column.VALID] * keys).sum())


def _pages(rows: NDArray[Any]) -> set[int]:
    """Returns the pages that blocks attend to. A page of several blocks counts once."""
    return {int(page) for row in rows for page in row[HEADER : HEADER + row[Column.NUM_PAGES]]}
