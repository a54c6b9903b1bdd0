"""Plugins: parts of the gateway that a setting names, and that other distributions can add."""

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

    Attributes:
        group: name of the group.
        included: plugins of this package, `module:name` by their names.
    """

    group: str
    included: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Returns the names of all installed plugins."""
        return sorted({*self.included, *entry_points(group=self.group).names})

    def load(self, name: str) -> Any:
        """Imports a plugin.

        Raises:
            LookupError: no plugin has this name.
            ImportError: the module of the plugin, or a package that it needs, is missing.
        """
        if name in self.included:
            return EntryPoint(name, self.included[name], self.group).load()
        points = tuple(entry_points(group=self.group, name=name))
        if not points:
            raise LookupError(f"no plugin of {self.group} has the name {name!r}")
        return points[0].load()
