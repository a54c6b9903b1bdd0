"""Counter of kernel launches, of bytes and of floating-point operations on torch's device `meta`.

Nothing is computed on `meta`. The counter records every operator of torch and every kernel of the
Triton language that a GPU would launch. `counted_stages.py` assembles a model on `meta`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lab.launches.kernel_launches import kernel_record, tensors_of
from lab.launches.launch import Launch, Record
from lab.launches.operator_launches import WHOLE, launches_of

aten = torch.ops.aten
META = torch.device("meta")

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
# Frequent operators that torch puts together from others. Their result is a new tensor.
_FRESH = {aten.linear, aten.matmul}

ENCODER, OUTSIDE = "encoder", "outside"  # stages of launches, besides the stages of the model


class Counted(NamedTuple):
    """Launch of a chunk.

    Attributes:
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
        self._stack.enter_context(_Constants(self))
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
            launches = self._counted[start:]
            graphs = any(launch.captured and launch.stage == name for launch in launches)
            stage = OUTSIDE if graphs else name
            self._counted += [Counted(_resolved(record), stage, False) for record in loose]

    def replay(self, records: Iterable[Record]) -> None:
        """Adds the launches of a graph to the present stage."""
        if self._counted is not None:
            name = self._stages[-1]
            self._counted += [Counted(_resolved(record), name, True) for record in records]

    def operator(self, func: Any, args: Any, launches: Sequence[Launch]) -> None:
        """Records an operator of torch after it was called."""
        if func.overloadpacket is aten.copy_:
            self._remember(args[0], args[1])
        if self._records is not None:
            self._records += launches

    def made(self, out: torch.Tensor, values: Any) -> None:
        """Remembers the integers that a tensor on `meta` was made from."""
        if not out.is_floating_point():
            dtype = str(out.dtype).removeprefix("torch.")
            self._contents[out.untyped_storage()._cdata] = out, np.array(values, dtype)

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
        # as integers of the tensor, which may have another width than those that were copied
        values = known[1].ravel().view(str(tensor.dtype).removeprefix("torch."))
        start = tensor.storage_offset()
        return values[start : start + tensor.numel()].reshape(tensor.shape)

    def _kernel(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Records a kernel of the Triton language in place of its launch."""
        if self._records is not None:
            self._records.append(kernel_record(name, arguments, self._content))


class _Constants(TorchFunctionMode):
    """Hands the numbers of tensors that are made on `meta` to a counter."""

    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.tensor and result.device == META:
            self._counter.made(result, args[0])
        return result


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
        options = dict(kwargs or {})
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _Operator.of(func)
        if operator.composite and not operator.fresh:
            with self:
                parts = func.decompose(*args, **options)
            if parts is not NotImplemented:
                return parts
        if operator.free:
            return func(*args, **options)
        key = func, _key(args), _key(options.items()), operator.has_flops and _settings()
        known = self._known.get(key)
        if known is None:
            result, launches = self._called(func, args, options, operator)
            if not _on_meta(result):
                return result
            arguments = (*args, *options.values())
            indices = [index for index, argument in enumerate(arguments) if argument is result]
            known = self._known[key] = _Known(_key((result,)), indices[:1], launches)
        elif known.in_place:
            result = (*args, *options.values())[known.in_place[0]]
        else:
            [result] = _made(known.result)
        self._counter.operator(func, args, known.launches)
        return result

    def _called(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], operator: _Operator
    ) -> tuple[Any, list[Launch]]:
        if not operator.composite:
            result = func(*args, **kwargs)
            return result, launches_of(func, args, kwargs, result) if _on_meta(result) else []
        records: list[Record] = []
        with self._counter.collected(records), self:
            result = func.decompose(*args, **kwargs)
        return result, [_resolved(record) for record in records]


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
        composite = packet not in WHOLE and func.has_kernel_for_dispatch_key(key)
        arguments = func._schema.arguments
        view = any(arg.alias_info and not arg.alias_info.is_write for arg in arguments)
        free, has_flops = view or packet in _NO_LAUNCH, packet in flop_registry
        return cls(composite, packet in _FRESH, free, has_flops or packet in _FRESH)


class _Known(NamedTuple):
    """Result of an operator on some shapes.

    Attributes:
        result: key of the result, from which tensors of the same shapes are made.
        in_place: index of the argument that is the result, for operators that work in place.
    """

    result: Any
    in_place: list[int]
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
        _Shape(tuple(value.shape), value.stride(), value.dtype, value.device.type)
        if isinstance(value, torch.Tensor)
        else _key(value)
        if isinstance(value, (list, tuple))
        else (type(value), value)
        for value in values
    )


def _made(key: Iterable[Any]) -> tuple[Any, ...]:
    """Makes tensors, and tuples of tensors, from their key."""
    return tuple(
        torch.empty_strided(part.size, part.stride, dtype=part.dtype, device=part.device)
        if isinstance(part, _Shape)
        else _made(part)
        for part in key
    )


def _on_meta(result: Any) -> bool:
    """Returns whether an operator returned tensors, all on `meta`."""
    outputs = tensors_of((result,))
    return bool(outputs) and all(output.device == META for output in outputs)


def _settings() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


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
