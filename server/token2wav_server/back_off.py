"""How soon a server that has failed is started again, and when that is given up. No clock here."""

from __future__ import annotations

from dataclasses import dataclass

_SETTLED_S = 60.0
_LONGEST_PAUSE_S = 30.0


@dataclass
class BackOff:
    """Failures in a row, and the pauses between restarts.

    Only failures of servers that never served are counted towards giving up: what one client can crash must not end the
    service of all. Pauses grow all the same, until a server lasts for a minute.

    Attributes:
        limit: restarts in a row of servers that never served; 0 for none at all.
        failures: of such servers in a row, so far.
    """

    limit: int
    failures: int = 0
    _pause_s: float = 0.0

    def failed(self, lasted_s: float, *, served: bool) -> float | None:
        """Notes a failure.

        Args:
            lasted_s: for how long the server was ready before.
            served: whether it had spoken by then.

        Returns:
            Seconds to wait before the next start: 0, 1, 2, 4 ... up to 30; None if there should be none.
        """
        if lasted_s >= _SETTLED_S:
            self._pause_s = 0.0
        if served or lasted_s >= _SETTLED_S:
            self.failures = 0
        self.failures += 1
        if self.failures > self.limit:
            return None
        pause_s, self._pause_s = self._pause_s, min(max(1.0, 2 * self._pause_s), _LONGEST_PAUSE_S)
        return pause_s
