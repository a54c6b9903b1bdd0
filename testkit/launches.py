"""Counter of the operators that launch work on a device."""

from __future__ import annotations

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Counts operators by their names, except for views and memory without content. In inference
    mode an operator counts once, without its parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func).removeprefix("aten.")
        if not func.is_view and not name.startswith(("empty", "new_empty")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
