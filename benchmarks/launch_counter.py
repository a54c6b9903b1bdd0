"""Counter of kernel launches, of bytes and of floating-point operations on torch's device `meta`.

Nothing is computed on `meta`. The counter records every operator of torch and every kernel of the
Triton language that a GPU would launch. `counted_stages.py` assembles a model on `meta`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from token2wav.execution.batch import CHUNK, HEADER, NUM_PAGES, PROMPT_PADDING, VALID

aten = torch.ops.aten
META = torch.device("meta")
# The number of pages is prime, so a tensor with an axis of this length holds pages of the cache.
ALL_PAGES = 10_007

# Operators that launch no kernel, besides views. `empty` and its relatives allocate memory.
_NO_LAUNCH = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten.lift_fresh,
    aten.detach,
    aten.resize_,
    aten.set_,
    aten.scalar_tensor,  # number that is assigned to a slice; on CUDA an argument of `fill_`
}
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
_TENSORS_PER_CAT = 128  # tensors that one kernel of `cat` takes
# Operators that read single rows of their first argument, and operators that write single rows.
_READ_ROWS = {aten.index_select, aten.gather, aten.index, aten.embedding}
_WRITE_ROWS = {aten.index_copy_, aten.index_put_, aten.scatter_}
# Operators that decompose into others on `meta`, but are one kernel on CUDA.
_WHOLE = {aten.scaled_dot_product_attention}
# Frequent operators that torch puts together from others. Their result is a new tensor.
_FRESH = {aten.linear, aten.matmul}

ENCODER, OUTSIDE = "encoder", "outside"  # stages of launches, besides the stages of the model


class Launch(NamedTuple):
    """One kernel launch.

    Attributes:
        name: name of the operator or of the kernel.
        bytes: bytes that it reads and writes, each tensor once.
        operations: floating-point operations of matrix products, convolutions and attention.
        kind: kind of these operations: a dtype, or `tf32`.
        from_host: whether it copies from the memory of the host.
        attention: whether it computes attention.
        complete: whether all bytes and operations are known. They are unknown if a kernel takes
            pages of the cache, but no block table that was copied from the host.
    """

    name: str
    bytes: float
    operations: float = 0.0
    kind: str = "float32"
    from_host: bool = False
    attention: bool = False
    complete: bool = True


# Bytes and operations of a launch that reads block tables depend on the contents of the tables, so
# they are computed for every replay.
Record = Launch | Callable[[], Launch]


class Counted(NamedTuple):
    """Launch of a chunk.

    Attributes:
        launch: the launch.
        stage: name of a stage of the model, `ENCODER`, or `OUTSIDE` for the host code of a stage
            around its graphs.
        captured: whether it is a node of a CUDA graph.
    """

    launch: Launch
    stage: str
    captured: bool


class LaunchCounter:
    """Counter of launches on `meta`: a context manager, inside of which models are made and run.

    Outside of `count`, the graphs and the encoder of a model do nothing, so that a history takes no
    time.
    """

    def __init__(self) -> None:
        self._mode = _Mode(self)
        self._stack = ExitStack()
        self._records: list[Record] | None = None  # list that takes launches at present
        self._counted: list[Counted] | None = None  # launches of the chunk that is counted
        self._stages: list[str] = []  # the present stage comes last
        # Integers that were copied from the host, by the storage of their tensor. The reference to
        # the tensor keeps the identity of its storage from being used again.
        self._contents: dict[int, tuple[torch.Tensor, NDArray[Any]]] = {}

    def __enter__(self) -> LaunchCounter:
        backends: list[Any] = [torch.backends.cudnn, torch.backends.cuda.matmul]
        for backend in backends:
            self._stack.callback(setattr, backend, "allow_tf32", backend.allow_tf32)
            backend.allow_tf32 = False  # as `keep_arithmetic_exact` sets it on a GPU
        self._stack.enter_context(_intercepted(self._kernel))
        self._stack.enter_context(self._mode)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._contents.clear()

    @property
    def counting(self) -> bool:
        """Whether a chunk is counted at present."""
        return self._counted is not None

    @contextmanager
    def collected(self, records: list[Record] | None) -> Iterator[None]:
        """Collects the launches of a block of code in a list; None drops them."""
        before, self._records = self._records, records
        try:
            yield
        finally:
            self._records = before

    @contextmanager
    def count(self) -> Iterator[list[Counted]]:
        """Counts the launches of a chunk. Yields the list that they are added to."""
        counted: list[Counted] = []
        self._counted = counted
        try:
            yield counted
        finally:
            self._counted = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Attributes the launches of a block of code to a stage."""
        loose, start = list[Record](), len(self._counted or ())
        self._stages.append(name)
        try:
            with self.collected(loose if self.counting else None):
                yield
        finally:
            self._stages.pop()
        if self._counted is not None:
            # A stage that replays no graph has no launches around graphs: all are its own.
            graphs = any(each.captured and each.stage == name for each in self._counted[start:])
            own = OUTSIDE if graphs else name
            self._counted += [Counted(_resolved(each), own, False) for each in loose]

    def replay(self, records: Iterable[Record]) -> None:
        """Adds the launches of a graph to the present stage."""
        if self._counted is not None:
            name = self._stages[-1]
            self._counted += [Counted(_resolved(each), name, True) for each in records]

    def operator(self, func: Any, args: Any, launches: Sequence[Launch]) -> None:
        """Records an operator of torch after it was called."""
        if func.overloadpacket is aten.copy_:
            self._remember(args[0], args[1])
        if self._records is not None:
            self._records += launches

    def _remember(self, out: torch.Tensor, source: torch.Tensor) -> None:
        storage = out.untyped_storage()
        from_host = out.device == META and source.device.type == "cpu"
        if from_host and not source.is_floating_point() and storage.nbytes() == out.nbytes:
            self._contents[storage._cdata] = out, source.numpy().copy()

    def _content(self, tensor: torch.Tensor) -> NDArray[Any] | None:
        """Returns the integers of a tensor that is a part of a tensor copied from the host."""
        known = self._contents.get(tensor.untyped_storage()._cdata)
        if known is None:
            return None
        start = tensor.storage_offset()
        return known[1].ravel()[start : start + tensor.numel()].reshape(tensor.shape)

    def _kernel(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Records a kernel of the Triton language in place of its launch."""
        if self._records is None:
            return
        # A tensor that is two arguments, such as a sum that replaces a summand, counts once.
        distinct = {
            id(value): value
            for key, value in arguments.items()
            if isinstance(value, torch.Tensor) and key not in _HALOS
        }
        tensors = list(distinct.values())
        plain = sum(_bytes(each) for each in tensors if ALL_PAGES not in each.shape)
        paged = [each for each in tensors if ALL_PAGES in each.shape]
        if not paged:
            self._records.append(Launch(name, plain, *_kernel_operations(name, arguments)))
            return
        integers = [each for each in tensors if each.dtype == torch.int32]
        half = any(each.dtype == torch.float16 for each in tensors)
        kind, attention = "float16" if half else "tf32", "attention" in name

        def with_tables() -> Launch:
            known = [self._content(each) for each in integers]
            tables = [
                each
                for each in known
                if each is not None and each.ndim == 2 and each.shape[1] > HEADER
            ]
            if not tables:
                return Launch(name, plain, attention=attention, complete=False)
            rate = arguments.get("RATE", 1)  # positions for each unit of the table
            pages, pairs = _visible(tables[0], paged[0].shape[2] // rate)
            pairs *= rate * rate
            if not attention:  # only the page of the block itself is written
                pages = int((tables[0][:, VALID] > 0).sum())
            elif "relative" not in name:  # the blocks of a chunk share their past
                pages = _pages_of_chunks(tables[0])
            read = pages * sum(_bytes(each) / ALL_PAGES for each in paged)
            branches, heads, dim_head = paged[0].shape[0], *paged[0].shape[3:]
            operations = 4.0 * branches * heads * dim_head * pairs if attention else 0.0
            if "project" in name:
                weight, given = arguments["weight"], arguments["x"]
                operations = 2.0 * given.numel() * weight.shape[0]
            if "relative" in name:  # every head multiplies with whole sinusoids too
                operations += 2.0 * arguments["HEADS"] * dim_head * pairs
            # float32 products on the matrix units are made of three TF32 products
            times = 1 if half else 3
            return Launch(name, plain + read, times * operations, kind, attention=attention)

        self._records.append(with_tables)


class _Mode(TorchDispatchMode):
    """Hands every operator on `meta` to a counter.

    Layers repeat the same operators on the same shapes. torch derives the shapes of a result in
    Python, which takes most of the time, so results and launches are remembered, for all counters
    of the process.
    """

    _operators: ClassVar[dict[Any, _Operator]] = {}
    _known: ClassVar[dict[Any, _Known]] = {}

    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _Operator.of(func)
        if operator.composite and not operator.fresh:
            with self:
                parts = func.decompose(*args, **given)
            if parts is not NotImplemented:
                return parts
        if operator.free:
            return func(*args, **given)
        key = func, _key(args), _key(given.items()), operator.has_flops and _settings()
        known = self._known.get(key)
        if known is None:
            result, launches = self._called(func, args, given, operator)
            if not _on_meta(result):
                return result
            places = [at for at, each in enumerate((*args, *given.values())) if each is result]
            known = self._known[key] = _Known(_key((result,)), places[:1], launches)
        elif known.places:
            result = (*args, *given.values())[known.places[0]]
        else:
            [result] = _made(known.result)
        self._counter.operator(func, args, known.launches)
        return result

    def _called(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], operator: _Operator
    ) -> tuple[Any, list[Launch]]:
        """Calls an operator, and returns its result and its launches."""
        if not operator.composite:
            result = func(*args, **kwargs)
            return result, launches_of(func, args, kwargs, result) if _on_meta(result) else []
        records: list[Record] = []
        with self._counter.collected(records), self:
            result = func.decompose(*args, **kwargs)
        return result, [_resolved(each) for each in records]


# Arguments of kernels for the states of whole streams, of which a launch reads and writes a small
# part.
_HALOS = ("old", "new", "exact_old", "exact_new")


@dataclass(frozen=True)
class _Operator:
    """Properties of an operator.

    Attributes:
        composite: whether torch puts it together from others, which are counted.
        fresh: whether it is in `_FRESH`.
        free: whether it launches nothing.
        has_flops: whether it does matrix products, convolutions or attention.
    """

    composite: bool
    fresh: bool
    free: bool
    has_flops: bool

    @classmethod
    def of(cls, func: Any) -> _Operator:
        packet = func.overloadpacket
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        composite = packet not in _WHOLE and func.has_kernel_for_dispatch_key(key)
        arguments = func._schema.arguments
        view = any(each.alias_info and not each.alias_info.is_write for each in arguments)
        free, has_flops = view or packet in _NO_LAUNCH, packet in flop_registry
        return cls(composite, packet in _FRESH, free, has_flops or packet in _FRESH)


class _Known(NamedTuple):
    """Result of an operator on some shapes.

    Attributes:
        result: key of the result, from which tensors of the same shapes are made.
        places: place of the argument that is the result, for operators that work in place.
        launches: its launches.
    """

    result: Any
    places: list[int]
    launches: list[Launch]


class _Shape(NamedTuple):
    """Everything about a tensor that the result of an operator depends on, except its numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns a hashable key of arguments: shapes of tensors, and all other values with their type,
    because 1 and 1.0 make results of different types.
    """
    return tuple(
        _Shape(tuple(each.shape), each.stride(), each.dtype, each.device.type)
        if isinstance(each, torch.Tensor)
        else _key(each)
        if isinstance(each, (list, tuple))
        else (type(each), each)
        for each in values
    )


def _made(key: Iterable[Any]) -> tuple[Any, ...]:
    """Makes tensors, and tuples of tensors, from their key."""
    return tuple(
        torch.empty_strided(each.size, each.stride, dtype=each.dtype, device=each.device)
        if isinstance(each, _Shape)
        else _made(each)
        for each in key
    )


def _on_meta(result: Any) -> bool:
    """Returns whether an operator returned tensors, all on `meta`."""
    outputs = _tensors((result,))
    return bool(outputs) and all(each.device == META for each in outputs)


def _settings() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def launches_of(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> list[Launch]:
    """Returns the launches of an operator; the first one has all bytes and operations."""
    packet, inputs = func.overloadpacket, _tensors((*args, *kwargs.values()))
    written = sum(map(_bytes, _tensors((result,))))
    # a tensor that is only written, such as the target of a copy, is not read
    if packet in (aten.copy_, aten.fill_, aten.zero_):
        inputs = inputs[1:]
    inputs = [each for each in inputs if each is not kwargs.get("out")]
    if packet in _READ_ROWS:
        read = written + sum(map(_bytes, inputs[1:]))
    elif packet in _WRITE_ROWS:
        read = sum(map(_bytes, inputs[1:]))
        written = _bytes(inputs[-1])
    else:
        read = sum(map(_bytes, inputs))
    operations, kind = 0.0, "float32"
    if packet in flop_registry:
        operations = float(flop_registry[packet](*args, **kwargs, out_val=result))
        kind = _kind(inputs, convolution=packet is aten.convolution)
    first = Launch(
        str(packet).removeprefix("aten."),
        read + written,
        operations,
        kind,
        from_host=any(each.device.type == "cpu" and each.dim() for each in inputs),
        attention=packet in _WHOLE,
    )
    return [first, *[Launch(first.name, 0.0)] * (_count(packet, args) - 1)]


def _count(packet: Any, args: Any) -> int:
    """Returns the number of kernels of an operator."""
    if packet is aten.convolution:
        return 1 if args[2] is None else 2
    if packet is aten.cat:
        return math.ceil(len(args[0]) / _TENSORS_PER_CAT)
    return _LAUNCHES.get(packet, 1)


def _kind(inputs: Sequence[torch.Tensor], *, convolution: bool) -> str:
    """Returns the kind of operations of a product or a convolution, under torch's settings."""
    name = str(inputs[-1].dtype).removeprefix("torch.")
    backend = torch.backends.cudnn if convolution else torch.backends.cuda.matmul
    return "tf32" if name == "float32" and backend.allow_tf32 else name


def _kernel_operations(name: str, arguments: Mapping[str, Any]) -> tuple[float, str]:
    """Returns the operations of a kernel that reads no pages, and their kind.

    A convolution is a product for each tap. Products of float32 are made of three TF32 products.
    Products of parallel branches of the vocoder count as if all branches had the longest kernel.
    """
    if name == "_multiply_rows":
        weights, out = arguments["weights"], arguments["out"]
        result = arguments["raw"] if out is None else out
        operations = 2.0 * result.numel() * weights.shape[2]
        if weights.dtype == torch.float64:
            return operations, "float64"
        return operations * (3 if arguments["PRECISION"] == "tf32x3" else 1), "tf32"
    if name == "_euler_step":
        weight, frames = arguments["weight"], arguments["x"].numel() // arguments["BANDS"]
        # float32 products on the matrix units are made of three TF32 products
        return 0.0 if weight is None else 3 * 2.0 * frames * weight.numel(), "tf32"
    if "product" in name:
        taps, weights, inputs = 1, arguments["weight"], arguments["INPUTS"]
    elif "convol" in name:
        weights = arguments["weights"]
        taps, inputs = weights.shape[0], weights.shape[-2]
    else:
        return 0.0, "float32"
    operations = 2.0 * arguments["out"].numel() * taps * inputs
    half = weights.dtype == torch.float16
    return (operations, "float16") if half else (3 * operations, "tf32")


def _visible(table: NDArray[Any], block_frames: int) -> tuple[int, int]:
    """Counts the pages that the blocks of a table attend to, and the pairs of query and key."""
    valid, pages = table[:, VALID].astype(int), table[:, NUM_PAGES].astype(int)
    keys = (pages - 1) * block_frames + valid - table[:, PROMPT_PADDING]
    return int(pages[valid > 0].sum()), int((valid * keys).sum())


def _pages_of_chunks(table: NDArray[Any]) -> int:
    """Counts the pages that the chunks of a table attend to, each page once for a chunk."""
    rows = table[table[:, VALID] > 0]
    return len(
        {(row[CHUNK], page) for row in rows for page in row[HEADER : HEADER + row[NUM_PAGES]]}
    )


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Lists the tensors among values and in their lists."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the numbers of a tensor; numbers that are repeated count once."""
    own = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(own) * tensor.element_size()


def _resolved(record: Record) -> Launch:
    return record if isinstance(record, Launch) else record()


@contextmanager
def _intercepted(launch: Callable[[str, Mapping[str, Any]], None]) -> Iterator[None]:
    """Replaces the launch of every kernel of the Triton language by a call with the name and the
    arguments of the kernel.
    """
    try:
        import triton
    except ModuleNotFoundError:
        yield
        return

    def with_grid(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            launch(kernel.__name__, arguments)

        return run

    with patch.object(triton.KernelInterface, "__getitem__", with_grid):
        yield
