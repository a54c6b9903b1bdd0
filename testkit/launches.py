"""Counter of the operators that launch work on a device."""

from __future__ import annotations

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

# Beginnings of the names of operators that only make views, or memory without content.
_NO_LAUNCH = (
    "alias",
    "as_strided",
    "detach",
    "empty",
    "expand",
    "flatten",
    "new_empty",
    "permute",
    "select",
    "slice",
    "split",
    "squeeze",
    "t.",
    "transpose",
    "unbind",
    "unflatten",
    "unfold",
    "unsqueeze",
    "view",
)


class Launches(TorchDispatchMode):
    """Counts operators by their names. In inference mode an operator counts once, without its
    parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func).removeprefix("aten.")
        if not name.lstrip("_").startswith(_NO_LAUNCH):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
