"""How soon a server that has failed is started again, and when that is given up. No clock here."""

from __future__ import annotations

from dataclasses import dataclass

_SETTLED_S = 60.0


@dataclass
class BackOff:
    """Counts failures in a row: those of servers that were ready for less than a minute.

    Attributes:
        limit: restarts in a row; 0 for none at all.
        failures: in a row, so far.
    """

    limit: int
    failures: int = 0

    def failed(self, lasted_s: float) -> float | None:
        """Notes a failure.

        Args:
            lasted_s: for how long the server was ready before.

        Returns:
            Seconds to wait before the next start: 0, 1, 2, 4 ...; None if there should be none.
        """
        if lasted_s >= _SETTLED_S:
            self.failures = 0
        self.failures += 1
        if self.failures > self.limit:
            return None
        return 0.0 if self.failures == 1 else 2.0 ** (self.failures - 2)
