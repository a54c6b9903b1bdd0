"""Report of a soak of a server or of a gateway."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from benchmarks.soak.crowd import Books, Plan, in_general
from benchmarks.soak.lines import TOLERANCE
from benchmarks.soak.watch import GROWTH_MIB, JUDGED_MINUTES, Watch


def findings(
    plan: Plan, books: Books, watch: Watch, problems: list[str], calm_since: float = 0.0
) -> dict[str, Any]:
    """Returns the observations of a soak, with a verdict on the growth of memory.

    Args:
        problems: problems that were found after the crowd had left.
        calm_since: monotonic time since which no process was killed. The growth is judged from
            then on.
    """
    growth, calm = watch.growth_mib(calm_since), watch.calm(calm_since)
    judged = calm[-1]["seconds"] - calm[0]["seconds"] >= 60 * JUDGED_MINUTES
    grown = [f"{name} grew by {mib} MiB" for name, mib in growth.items() if mib > GROWTH_MIB]
    return {
        "plan": asdict(plan),
        "tolerance": TOLERANCE,
        "behaved": {
            "utterances": len(books.spoken),
            "audio_seconds": round(sum(books.spoken), 2),
            "excused": dict(Counter(map(in_general, books.excused)).most_common()),
        },
        "misbehaved": books.answers(),
        "resources": {
            "growth_mib": growth,
            "allowed_mib": GROWTH_MIB if judged else None,
            "most": watch.most(),
            "readings": watch.rows(),
        },
        "problems": [*books.problems, *problems, *(grown if judged else [])],
    }
