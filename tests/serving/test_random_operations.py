"""A round of the random operations of the soak in each of its settings: many threads and streams on
one small model.
"""

from __future__ import annotations

import pytest

from benchmarks.soak.operations import SETTINGS, Round


@pytest.mark.parametrize("settings", SETTINGS)
def test_random_operations_of_many_threads(
    settings: str,
) -> None:
    played = Round(15, settings)
    played.run()
    assert played.problems == []
    assert (
        sum(number for event, number in played.events.items() if event.startswith("compared")) > 0
    )
