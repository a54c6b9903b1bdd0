"""A round of random operations in each of their settings: many threads and streams on one small
model. The soak of a server runs more rounds.
"""

from __future__ import annotations

import pytest

from testkit.random_operations import INTERRUPTIONS, SETTINGS, Round


@pytest.mark.parametrize("settings", SETTINGS)
def test_random_operations_of_many_threads(settings: str) -> None:
    played = Round(15, settings)
    played.run()
    assert played.problems == []
    for event in ("opened in a batch", "computed in a batch"):
        assert bool(played.events[event]) == (settings == INTERRUPTIONS)
    assert (
        sum(number for event, number in played.events.items() if event.startswith("compared")) > 0
    )
