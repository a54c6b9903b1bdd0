"""Plugins: parts that a setting names, and that other distributions can add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any


@dataclass(frozen=True)
class Plugins:
    """Plugins of a kind.

    Another distribution adds one with an entry point of the group:

        [project.entry-points."token2wav.aligners"]
        mine = "my_package:MyAligner"
    """

    group: str
    # Plugins of this package, `module:name` by their names.
    included: Mapping[str, str] = field(default_factory=dict)

    def load(self, name: str) -> Any:
        """Imports a plugin. Raises LookupError if no plugin has this name, and ImportError if the
        plugin cannot be imported, such as for a package that is not installed.
        """
        points = {point.name: point for point in entry_points(group=self.group)}
        points |= {own: EntryPoint(own, value, self.group) for own, value in self.included.items()}
        if name not in points:
            known = ", ".join(sorted(points)) or "none"
            raise LookupError(f"{name[:64]!r} is not one of the installed ones: {known}")
        try:
            return points[name].load()
        except Exception as error:
            raise ImportError(
                f"{name} cannot be imported: {type(error).__name__}: {error}"
            ) from error
