"""What the sections say to the project's aims for one data-centre GPU, and whether anything is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]

FIRST_CHUNK_MS = 10.0
DRIFT = 0.10
PEER_RATIO = 10.0
STREAMS = 300


@dataclass(frozen=True)
class Verdict:
    """One aim.

    Attributes:
        aim: in words, with its bound.
        measured: in words; why there is nothing, if there is nothing.
        met: None where it was not measured.
    """

    aim: str
    measured: str
    met: bool | None

    @property
    def word(self) -> str:
        return {True: "met", False: "not met", None: "no verdict"}[self.met]


def verdicts(sections: Sections) -> list[Verdict]:
    """Of every aim, whether measured or not. Figures of a CPU or of a smaller model are shown and meet nothing."""
    found = [judge(sections) for judge in (first_chunk, drift, against_peer, capacity, through_server)]
    if rehearsed(sections):
        return [Verdict(each.aim, f"in a rehearsal: {each.measured}", None) for each in found]
    return found


def rehearsed(sections: Sections) -> bool:
    """Whether any section ran without a GPU, or with another model than that of the public size."""
    return any(section.get("gpu") is None or section["size"] != "full" for section in sections.values())


def first_chunk(sections: Sections) -> Verdict:
    aim = (
        f"first chunk (25 tokens, cached voice, one stream) in at most {FIRST_CHUNK_MS:g} ms, flow and vocoder, median"
    )
    rows = [
        row
        for row in sections.get("chunks", {}).get("rows", [])
        if not row["spoken_s"] and row["streams"] == 1 and row["hop_tokens"] == 25
    ]
    if not rows:
        return _unmeasured(aim, sections, "chunks")
    [median, least, most] = rows[0]["total_ms"]
    return Verdict(aim, f"{median:.2f} ms ({least:.2f} to {most:.2f})", median <= FIRST_CHUNK_MS)


def drift(sections: Sections) -> Verdict:
    aim = f"time of a chunk drifts by less than {DRIFT:.0%} from the 3rd to the 60th, with a window"
    found = sections.get("chunks", {}).get("drift")
    if not found:
        return _unmeasured(aim, sections, "chunks")
    measured = (
        f"{found['drift']:+.1%}: {found['third_ms']:.2f} ms, then {found['last_ms']:.2f} ms at chunk {found['chunks']} "
        f"(window of {found['left_blocks']} blocks)"
    )
    return Verdict(aim, measured, abs(found["drift"]) < DRIFT)


def against_peer(sections: Sections) -> Verdict:
    aim = f"100-token chunks of 64 streams in one batch: at least {PEER_RATIO:g} times as many as recomputed one by one"
    rows = [row for row in sections.get("peer", {}).get("rows", []) if row["ratio"] is not None]
    if not rows:
        return _unmeasured(aim, sections, "peer")
    each = ", ".join(f"{row['ratio']:.1f} after {row['spoken_s']:g} s" for row in rows)
    measured = f"{each} ({rows[0]['streams']} streams, {rows[0]['hop_tokens']} tokens)"
    return Verdict(aim, measured, min(row["ratio"] for row in rows) >= PEER_RATIO)


def capacity(sections: Sections) -> Verdict:
    aim = f"at least {STREAMS} streams of 20 s in real time, 99 % of them unbroken, at the engine"
    rows = [row for row in sections.get("streams", {}).get("capacity", []) if row["streams"] is not None]
    if not rows:
        return _unmeasured(aim, sections, "streams")
    best = max(rows, key=lambda row: row["streams"])
    number = f"{'at least ' if best['at_least'] else ''}{best['streams']}"
    return Verdict(aim, f"{number} ({best['setup']})", best["streams"] >= STREAMS)


def through_server(sections: Sections) -> Verdict:
    aim = f"the same through the server: at least {STREAMS} clients at the pace of a language model"
    rows = [row for row in sections.get("server", {}).get("rows", []) if row["clients"] and row["rate"] == 25.0]
    if not rows:
        return _unmeasured(aim, sections, "server")
    held = [row["clients"] for row in rows if row["share_without_gaps"]["0.05 s"] >= 0.99 and not row["failed"]]
    measured = f"{max(held, default=0)} of up to {max(row['clients'] for row in rows)} that were tried"
    return Verdict(aim, measured, max(held, default=0) >= STREAMS)


def _unmeasured(aim: str, sections: Sections, name: str) -> Verdict:
    problem = sections[name].get("problem") if name in sections else f"section {name} has not run"
    return Verdict(aim, problem or f"section {name} has nothing of it", None)


def faults(sections: Sections) -> list[str]:
    """What is wrong, not only slow: failed tests, results beyond their bounds, sections that ended early."""
    found = [f"test failed: {name}" for name in sections.get("tests", {}).get("failed", [])]
    parity = sections.get("parity", {})
    for result in parity.get("engines", []):
        case = result["case"]
        label = f"{case['engine']} {case['precision']}{'' if case['graphs'] else ', no graphs'}"
        failures = (result["verification"] or {}).get("failures", [])
        found += [f"engine {label}: {failure}" for failure in failures]
        if case["engine"] == "torch" and result["problem"]:  # others may just not be installed
            found.append(f"engine {label}: {result['problem']}")
    found += [f"batch of {row['streams']}: {row['problem']}" for row in parity.get("batches", []) if row["problem"]]
    found += [
        f"bucket {'x'.join(map(str, row['shape']))} {row['precision']}, {row['filling']}: {row['problem']}"
        for row in parity.get("buckets", [])
        if row["problem"]
    ]
    return found + [f"section {name}: {section['problem']}" for name, section in sections.items() if section["problem"]]
