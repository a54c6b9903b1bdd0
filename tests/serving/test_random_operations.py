"""A round of random operations in each of their settings: many threads and streams on one small
model. The soak of a server runs more rounds.
"""

from __future__ import annotations

from collections import Counter

import pytest

from testkit.random_operations import INTERRUPTIONS, SETTINGS, Round

INTERRUPTED = "opened in a batch", "computed in a batch"


@pytest.mark.parametrize("settings", SETTINGS)
def test_random_operations_of_many_threads(settings: str) -> None:
    events = Counter[str]()
    # How many first chunks find a batch to interrupt depends on the threads, in one round few.
    for seed in range(15, 20):
        played = Round(seed, settings)
        played.run()
        assert played.problems == []
        events += played.events
        if settings != INTERRUPTIONS or all(events[event] for event in INTERRUPTED):
            break
    for event in INTERRUPTED:
        assert bool(events[event]) == (settings == INTERRUPTIONS)
    assert sum(number for event, number in events.items() if event.startswith("compared")) > 0
