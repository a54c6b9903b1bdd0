"""Reading of weights for any module, without executing any content of a file.

Pickles are read with `weights_only=True`. All names and shapes are checked before a tensor is used,
and one error lists every mismatch. Functions that read or convert weights raise CheckpointError for
an unreadable file, a name that is missing, unknown or there twice, a shape or type that does not
fit the network, a value that is not finite, and a pickle of other objects than tensors.
"""

from __future__ import annotations

import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.overrides import TorchFunctionMode

from token2wav.config.strict_yaml import stand_in
from token2wav.errors import CheckpointError, one_line
from token2wav.published.checkpoint_files import stored_bytes, weight_files
from token2wav.published.nemo_archive import WEIGHTS, read_member

_FACTORIES = (torch.empty, torch.zeros, torch.ones)  # functions that allocate weights of modules
_BUFFERS = 1 << 24  # most values that a network has besides its weights
_MAPPED_BYTES = 16 << 20
_LISTED = 8  # names of each kind in an error
# Endings of the two tensors of a weight norm, in the older names, and the newer names of torch.
_LENGTH, _DIRECTION = ".weight_g", ".weight_v"
_NEWER = {
    ".parametrizations.weight.original0": _LENGTH,
    ".parametrizations.weight.original1": _DIRECTION,
}


def read_state(
    path: Path, prefixes: tuple[str, ...] = ("",), *, wrappers: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Reads the weights of a file or of shards, on the CPU: of `.safetensors` files, or of pickled
    state dicts, alone or in a `.nemo` archive. Their tensors may be views of the file.

    Args:
        path: file that `weights_file` found.
        prefixes: beginnings of the names of the wanted weights. Other weights are not read.
        wrappers: keys of a pickle. A dict under such a key is read in place of the pickle.
    """
    state: dict[str, Any] = {}
    owners: dict[str, Path] = {}
    for file, listed in weight_files(path, prefixes).items():
        part = _read_file(file, prefixes, wrappers)
        if listed is not None and (absent := sorted(listed - part.keys())):
            raise CheckpointError(f"{file}: '{absent[0]}' is missing, but {path.name} names it")
        for name in part:
            if (first := owners.setdefault(name, file)) != file:
                raise CheckpointError(f"{file}: '{name}' is in {first.name} too")
        state |= part
    if not state and prefixes != ("",):
        patterns = " or ".join(f"{prefix}*" for prefix in prefixes)
        raise CheckpointError(f"{path}: no weight is named {patterns}")
    return state


def _read_file(path: Path, prefixes: tuple[str, ...], wrappers: tuple[str, ...]) -> dict[str, Any]:
    with _reading(path):
        if path.suffix == ".safetensors":
            return _read_tensors(path, prefixes)
        if path.suffix == ".nemo":
            state = _read_pickle(read_member(path, WEIGHTS), path)
        else:  # files older than torch 1.6 are no zip archives and cannot be mapped
            state = _read_pickle(path, path, mmap=zipfile.is_zipfile(path))
    for wrapper in wrappers:
        if isinstance(nested := state.get(wrapper), dict):
            state = nested
    return {name: value for name, value in state.items() if str(name).startswith(prefixes)}


def _read_pickle(source: Path | BytesIO, path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Reads a pickled state dict, on the CPU.

    Args:
        source: file, or content of a file.
    """
    try:
        with warnings.catch_warnings():
            # Warnings about odd pickle protocols. A file that cannot be read raises an error
            # anyway.
            warnings.simplefilter("ignore")
            state = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        # The rest of torch's message explains how to execute the pickle.
        reference = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"the file refers to '{reference.group(1)}'"
            if reference
            else "the file is not a pickle of tensors"
        )
        raise CheckpointError(f"{path}: refused, nothing was executed: {reason}") from error
    except Exception as error:  # a damaged pickle makes torch raise almost anything
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)[:200]}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: expected a state dict, got {type(state).__name__}")
    return state


def read_tensor(path: Path, name: str) -> torch.Tensor | None:
    """Reads one tensor of a `.safetensors` file, on the CPU; None if the file has no such name."""
    with _reading(path), safe_open(path, framework="pt") as tensors:
        return tensors.get_tensor(name) if name in tensors.keys() else None  # noqa: SIM118 - it is no mapping


def _read_tensors(path: Path, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Reads tensors of a `.safetensors` file, on the CPU. Floats become float32.

    A mapped file counts as memory as far as it was read. So it is mapped anew for every 16 MB.
    """
    with safe_open(path, framework="pt") as tensors:
        waiting = [name for name in tensors.keys() if name.startswith(prefixes)]  # noqa: SIM118
    waiting.reverse()
    values: dict[str, torch.Tensor] = {}
    while waiting:
        with safe_open(path, framework="pt") as tensors:
            mapped = 0
            while waiting and mapped < _MAPPED_BYTES:
                name = waiting.pop()
                value = tensors.get_tensor(name)
                mapped += value.nbytes
                dtype = torch.float32 if value.is_floating_point() else value.dtype
                values[name] = value.to(dtype, copy=True)
                del value  # the last reference keeps the file mapped
    return values


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns every error of a reader into a CheckpointError with the path. A damaged file makes the
    readers raise many kinds of errors.
    """
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path}: the file is empty; download it again")
        with path.open("rb") as file:
            if problem := stand_in(file.read(64)):
                raise CheckpointError(f"{path}: {problem}")
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)[:200]}") from error


def floating_tensors(
    state: Mapping[str, Any], path: Path, current_name: Callable[[str], str]
) -> dict[str, torch.Tensor]:
    """Renames the tensors of a state dict to the parameter names of this project."""
    weights: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: '{name}' is a {type(value).__name__}, not a tensor")
        if not value.is_floating_point():
            raise CheckpointError(
                f"{path}: '{name}' has type {value.dtype}, expected floating point"
            )
        current = current_name(str(name))
        if current in weights:
            raise CheckpointError(f"{path}: '{current}' appears twice, the second time as '{name}'")
        weights[current] = value
    return weights


def fold_weight_norm(weights: Mapping[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Folds weight norm: weight = g * v / ||v||, with the norm over all axes except the first.

    A tensor without its partner keeps its name, and the later check of names rejects it.

    Args:
        weights: tensors by name, in the older or the newer names of torch.
    """
    folded: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        current = _older_name(name)
        if current in folded:
            raise CheckpointError(f"{path}: '{current}' appears twice, the second time as '{name}'")
        folded[current] = value
    for name in list(folded):
        stem = name.removesuffix(_DIRECTION)
        if stem == name or stem + _LENGTH not in folded:
            continue
        length, direction = folded.pop(stem + _LENGTH).float(), folded.pop(name).float()
        if direction.dim() != 3 or length.shape != (len(direction), 1, 1):
            raise CheckpointError(
                f"{path}: '{stem}{_LENGTH}' has shape {tuple(length.shape)}, which does not "
                f"match '{name}' of {tuple(direction.shape)}"
            )
        if stem + ".weight" in folded:
            raise CheckpointError(
                f"{path}: '{stem}.weight' appears twice, the second time as '{name}'"
            )
        folded[stem + ".weight"] = direction * (length / direction.norm(dim=(1, 2), keepdim=True))
    return folded


def _older_name(name: str) -> str:
    for newer, older in _NEWER.items():
        if name.endswith(newer):
            return name.removesuffix(newer) + older
    return name


def fitting_weights(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor],
    path: Path,
    published: Callable[[str], str] = str,
) -> dict[str, torch.Tensor]:
    """Returns the weights of a module in float32, after all checks.

    Args:
        published: returns the name of a weight in the file, for messages.
    """
    _compare(module, weights, path, published)
    widened = {name: value.float() for name, value in weights.items()}
    if broken := [name for name, value in widened.items() if not _is_finite(value)]:
        raise CheckpointError(f"{path}: NaN or infinite values in {_listed(broken, published)}")
    return widened


def _is_finite(value: torch.Tensor) -> bool:
    """Returns whether no number is NaN or infinite, without memory for a number each."""
    return not value.numel() or bool(torch.isfinite(torch.stack(value.aminmax())).all())


class SkipInit(TorchFunctionMode):
    """Mode in which new modules get uninitialised weights, which `fill` replaces.

    Modules on torch's `meta` device would need no memory at all. But arithmetic there imports
    torch's compiler, which adds two seconds to a start.

    Args:
        path: file of the weights. A network for which this file, or all shards, are too small is
            rejected before it takes memory.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        # a weight takes at least one byte of the files
        self._most = stored_bytes(path) + _BUFFERS
        self._allocated = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        if func in _FACTORIES:
            self._allocated += math.prod(args[0] if isinstance(args[0], Sequence) else args)
            if self._allocated > self._most:
                raise CheckpointError(
                    f"{self._path}: the file is too small for the configuration, whose "
                    f"network has more than {self._most} parameters; correct the depth and "
                    "widths in the configuration"
                )
        return func(*args, **(kwargs or {}))


def fill(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Replaces the weights of a module; the old ones are ignored."""
    # Views of a file are copied, because model files are replaced while servers run. Memory that
    # torch has allocated itself is resizable.
    copies = {
        name: value if value.untyped_storage().resizable() else value.clone()
        for name, value in weights.items()
    }
    module.load_state_dict(copies, assign=True)


def _compare(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor],
    path: Path,
    published: Callable[[str], str],
) -> None:
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    problems = {
        "missing": [name for name in expected if name not in shapes],
        "unexpected": [name for name in shapes if name not in expected],
        "wrongly shaped": [
            name for name, shape in expected.items() if shapes.get(name, shape) != shape
        ],
    }

    def described(name: str) -> str:
        shape, expected_shape = shapes.get(name), expected.get(name)
        if shape is None or expected_shape is None:
            return published(name)
        return f"{published(name)} {shape} instead of {expected_shape}"

    if any(problems.values()):
        lists = [
            f"{len(names)} {kind}: {_listed(names, described)}"
            for kind, names in problems.items()
            if names
        ]
        raise CheckpointError(
            f"{path}: parameters do not match the configuration; {'; '.join(lists)}"
        )


def _listed(names: list[str], described: Callable[[str], str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(described, names[:_LISTED])) + more
