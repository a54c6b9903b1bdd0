"""Launches of the operators of torch: number, bytes, operations and expected times, from arguments
and results on torch's device `meta`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lab.launches.cublas_products import library_us
from lab.launches.kernel_launches import bytes_of, tensors_of
from lab.launches.launch import Launch
from token2wav.kernels.tiles import ProductSize, table

aten = torch.ops.aten

# Operators that launch more than one kernel on CUDA. This is an assumption from the source of torch
# 2.11; all others launch one. A bias is part of a matrix product (cublasLt), but a kernel of its
# own after a convolution. Libraries may add kernels that change the layout or join partial sums.
_LAUNCHES = {
    aten.constant_pad_nd: 2,  # fill, copy
    aten.masked_fill: 2,  # copy, fill
    aten.index_copy: 2,  # copy, scatter
    aten.index_put: 2,
    aten.scatter: 2,
    aten.baddbmm: 2,  # copy, product
    aten.native_group_norm: 3,
}
_KEYS_AT_ONCE = 64  # keys that attention of a library reads in an iteration; assumed
_TENSORS_PER_CAT = 128  # tensors that one kernel of `cat` takes
# Operators that read single rows of their first argument, and operators that write single rows.
_READ_ROWS = {aten.index_select, aten.gather, aten.index, aten.embedding}
_WRITE_ROWS = {aten.index_copy_, aten.index_put_, aten.scatter_}
# Operators that count as another one, which has the same arguments.
_LIKE = {aten._addmm_activation: aten.addmm}
# Operators that decompose into others on `meta`, but are one kernel on CUDA.
_ATTENTION = aten.scaled_dot_product_attention
WHOLE = {_ATTENTION, aten.rms_norm}


def launches_of(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> list[Launch]:
    """Returns the launches of an operator; the first one has all bytes and operations."""
    packet, inputs = func.overloadpacket, tensors_of((*args, *kwargs.values()))
    written = sum(map(bytes_of, tensors_of((result,))))
    # a tensor that is only written, such as the target of a copy, is not read
    if packet in (aten.copy_, aten.fill_, aten.zero_):
        inputs = inputs[1:]
    inputs = [tensor for tensor in inputs if tensor is not kwargs.get("out")]
    if packet in _READ_ROWS:
        read = written + sum(map(bytes_of, inputs[1:]))
    elif packet in _WRITE_ROWS:
        read = sum(map(bytes_of, inputs[1:]))
        written = bytes_of(inputs[-1])
    else:
        read = sum(map(bytes_of, inputs))
    operations, kind, inner = 0.0, "float32", 0.0
    counted = _LIKE.get(packet, packet)
    if counted in flop_registry:
        operations = float(flop_registry[counted](*args, out_val=result))
        kind = _kind(inputs, convolution=packet is aten.convolution)
        inner = _inner_us(packet, args, result, operations)
    first = Launch(
        str(packet).removeprefix("aten."),
        read + written,
        operations,
        kind,
        inner,
        from_host=any(tensor.device.type == "cpu" and tensor.dim() for tensor in inputs),
        attention=packet is _ATTENTION,
    )
    return [first, *[Launch(first.name, 0.0)] * (_count(packet, args) - 1)]


def _count(packet: Any, args: Any) -> int:
    """Returns the number of kernels of an operator."""
    if packet is aten.convolution:
        return 1 if args[2] is None else 2
    if packet is aten.cat:
        return math.ceil(len(args[0]) / _TENSORS_PER_CAT)
    return _LAUNCHES.get(packet, 1)


def _inner_us(packet: Any, args: Any, result: torch.Tensor, operations: float) -> float:
    """Returns the expected time inside of a product, a convolution or attention of a library."""
    if packet is _ATTENTION:
        iterations = -(-args[1].shape[-2] // _KEYS_AT_ONCE)
        return (1 + iterations) * table().rates.latency_us
    if not operations:
        return 0.0
    if packet is aten.convolution:
        x, weight, transposed, copies = args[0], args[1], args[6], args[8]
        signal = x if transposed else result  # whose positions are the rows of the product
        rows = signal.numel() // signal.shape[1]
        # of a group; a transposed convolution has the outputs of all taps
        outputs = weight[0].numel() if transposed else len(weight) // copies
    else:
        rows, outputs = result.shape[-2:]
        copies = math.prod(result.shape[:-2])
    inputs = round(operations / 2 / (rows * outputs * copies))
    dtype = args[1].dtype  # the result may be wider
    return library_us(ProductSize(rows, outputs, inputs, dtype, copies))


def _kind(inputs: Sequence[torch.Tensor], *, convolution: bool) -> str:
    """Returns the kind of operations of a product or a convolution, under torch's settings."""
    name = str(inputs[-1].dtype).removeprefix("torch.")
    backend = torch.backends.cudnn if convolution else torch.backends.cuda.matmul
    return "tf32" if name == "float32" and backend.allow_tf32 else name
