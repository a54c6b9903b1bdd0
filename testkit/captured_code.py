"""Checks, without a GPU, of code that a CUDA graph captures: neither the host nor the device reads
the tensors of the other. Either access would make a capture fail.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class NothingCopied(TorchFunctionMode):
    """Check that no tensor is made from numbers of the host.

    On a GPU, such a copy waits for the device.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy), f"{func} copies"
        index = args[1] if func is torch.Tensor.__getitem__ and len(args) > 1 else ()
        assert not any(
            isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,))
        )
        return func(*args, **(kwargs or {}))


class OnDevice(TorchDispatchMode):
    """Check that all tensors are on one device.

    The device is torch's `meta`. The host cannot read its tensors either.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            assert not isinstance(value, torch.Tensor) or value.device.type == "meta", (
                f"{func} uses the host's memory"
            )
        return out
