"""Report of one or several slices: verdicts on the project's aims, faults, and tables of rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chunk_batch import chunk_key
from benchmarks.gpu.first_audio import first_audio_key
from benchmarks.gpu.late_first import late_first_key
from benchmarks.gpu.parity import parity_key
from benchmarks.gpu.settings import LOOP, OURS, PACE, PLANNED, RESULTS, SECTIONS, SLICES, Row
from benchmarks.gpu.streams import UNBROKEN
from benchmarks.gpu.worker import write_json

Content = Mapping[str, Any]  # content of one results.json, or of several merged ones

WORDS = {True: "met", False: "not met", None: "not shown"}
FIRST_AUDIO_MS, FIRST_CHUNK_MS, LATE_FIRST_MS = 5.0, 10.0, 40.0
DRIFT, STREAMS = 0.10, 300
LOOP_RATIO, LOOP_STREAMS, LOOP_HISTORIES = 10.0, 64, (2.0, 10.0)
_LONG = ("kernels", "chunk_ms")  # lists that only report.json has
_COMMON = ("section", "key", "problem", "left_out", "took_s")  # keys that every row has


class Verdict(NamedTuple):
    """Verdict on one aim: the aim with its bound, the measured value, and whether the aim is met.

    `met` is None if the aim was not shown.
    """

    aim: str
    measured: str
    met: bool | None


def merge(folders: Sequence[Path]) -> dict[str, Any]:
    """Merges the results of several slices.

    If a row was measured twice, the later one counts, unless it was left out. Raises ValueError if
    a folder has no results, or its GPU, model or precision differ from the folders before.
    """
    rows: dict[tuple[str, str], Row] = {}
    whole: dict[str, Any] = {"facts": {}, "runs": [], "sections": []}
    for folder in folders:
        if not (folder / RESULTS).is_file():
            raise ValueError(f"{folder} has no {RESULTS}")
        content = json.loads((folder / RESULTS).read_text())
        for name in ("gpu", "size", "precision", "graphs"):
            before, now = whole["facts"].get(name), content["facts"].get(name)
            if whole["runs"] and before != now:
                raise ValueError(
                    f"{folder}: {name} is {now}, and in the folders before {before}; merge "
                    "the folders separately"
                )
        whole["facts"] |= content["facts"]
        whole["runs"].append(
            {name: content["facts"].get(name) for name in ("date", "commit", "command")}
        )
        whole["sections"] += content["sections"]
        for row in content["rows"]:
            if not row["left_out"] or (row["section"], row["key"]) not in rows:
                rows[row["section"], row["key"]] = row
    return whole | {"rows": list(rows.values())}


def verdicts(content: Content) -> list[Verdict]:
    """Returns the verdict on every aim for one data-centre GPU.

    Figures of a CPU or of a smaller model meet no aim.
    """
    conclusions = [
        _parity(content),
        _first_audio(content),
        _first_chunk(content),
        _late_first(content),
        _drift(content),
        _loop(content),
        *_real_time(content),
    ]
    if rehearsed(content):
        return [
            Verdict(verdict.aim, f"in a rehearsal: {verdict.measured}", None)
            for verdict in conclusions
        ]
    return conclusions


def rehearsed(content: Content) -> bool:
    """Returns whether the results come from a CPU, or from a model that has not the public size."""
    return content["facts"].get("gpu") is None or content["facts"]["size"] != "full"


def rows_of(content: Content, section: str) -> dict[str, Row]:
    """Returns the rows of a section that have values, by key, within their bounds or not."""
    return {
        row["key"]: row
        for row in content["rows"]
        if row["section"] == section and row.keys() - _COMMON
    }


def faults(content: Content) -> list[str]:
    """Lists faults: failed tests, results beyond their bounds, crashes, and incomplete sections.

    Slow results are not faults.
    """
    problems = [(f"{row['section']}: {row['key']}", row["problem"]) for row in content["rows"]]
    problems += [(section["section"], section["problem"]) for section in content["sections"]]
    return [f"{name}: {problem}" for name, problem in problems if problem]


def _parity(content: Content) -> Verdict:
    aim = (
        "batches of any size equal each of their streams alone on torch in float32, "
        "within the bounds of an engine"
    )
    rows, planned = rows_of(content, "parity"), planned_parity()
    beyond, shown = sum(bool(row["problem"]) for row in rows.values()), len(planned & rows.keys())
    measured = f"{shown} of {len(planned)} batches were compared; {beyond} exceed their bounds"
    return Verdict(aim, measured, False if beyond else True if shown == len(planned) else None)


def planned_parity() -> set[str]:
    """Returns the keys of the batches that the aim needs. Float8 has no aim."""
    return {
        parity_key(replace(PLANNED, **changes), size)
        for name, _, changes in chain.from_iterable(SLICES.values())
        if name == "parity"
        for size in PLANNED.parity_batches
    }


def _first_audio(content: Content) -> Verdict:
    aim = (
        "first audio with default settings (cached voice, one stream) in at most "
        f"{FIRST_AUDIO_MS:g} ms"
    )
    return _within(content, ("first_audio",), first_audio_key(1), "ms", aim, FIRST_AUDIO_MS)


def _first_chunk(content: Content) -> Verdict:
    aim = (
        "first chunk of a whole block (25 tokens, cached voice, one stream) in at most "
        f"{FIRST_CHUNK_MS:g} ms for flow and vocoder"
    )
    sections = "first_audio", "chunks"
    return _within(content, sections, chunk_key(1, 25, 0.0), "total_ms", aim, FIRST_CHUNK_MS)


def _late_first(content: Content) -> Verdict:
    streams = PLANNED.late_streams
    aim = (
        f"first audio of a stream whose tokens arrive when a batch of {streams} streams has just "
        f"begun (25 tokens, cached voice) in at most {LATE_FIRST_MS:g} ms"
    )
    key, without = (late_first_key(streams, interrupts=interrupts) for interrupts in (True, False))
    verdict = _within(content, ("late_first",), key, "wait_ms", aim, LATE_FIRST_MS)
    if not (row := rows_of(content, "late_first").get(without)):
        return verdict
    measured = f"{verdict.measured}; without interruptions {row['wait_ms'][0]:.2f} ms"
    return verdict._replace(measured=measured)


def _within(
    content: Content, sections: Sequence[str], key: str, column: str, aim: str, bound: float
) -> Verdict:
    """Compares the median of a row with a bound. The row may be in any of some sections."""
    rows = [found[key] for section in sections if key in (found := rows_of(content, section))]
    if not rows:
        return Verdict(f"{aim}, at the median", _why(content, sections[0], key), None)
    median, least, most = rows[-1][column]
    measured = f"{median:.2f} ms ({least:.2f} to {most:.2f})"
    return Verdict(f"{aim}, at the median", measured, median <= bound)


def _drift(content: Content) -> Verdict:
    aim = f"time of a chunk drifts by less than {DRIFT:.0%} from the 3rd to the 60th, with a window"
    for row in rows_of(content, "drift").values():
        measured = (
            f"{row['drift']:+.1%}: {row['third_ms']:.2f} ms, "
            f"{row['last_ms']:.2f} ms at chunk {row['chunks']}"
        )
        return Verdict(aim, measured, abs(row["drift"]) < DRIFT if row["chunks"] >= 60 else None)
    return Verdict(aim, _why(content, "drift"), None)


def _loop(content: Content) -> Verdict:
    aim = (
        f"chunks of {LOOP_STREAMS} streams in one batch: at least {LOOP_RATIO:g} times as many as "
        "by the public loop, after "
        f"{' and '.join(f'{spoken_s:g}' for spoken_s in LOOP_HISTORIES)} s"
    )
    ratios, shown = [], []
    rows = {(row["system"], row["streams"], row["after (s)"]): row for row in systems(content)}
    for spoken_s in LOOP_HISTORIES:
        both = [rows.get((name, LOOP_STREAMS, spoken_s)) for name in (LOOP, OURS)]
        ratio = both[0]["ms"] / both[1]["ms"] if both[0] and both[1] else None
        ratios.append(ratio)
        shown.append(f"{f'{ratio:.1f}' if ratio else 'not shown'} after {spoken_s:g} s")
    if not any(ratios):
        return Verdict(aim, _why(content, "baselines"), None)
    missed = any(ratio and ratio < LOOP_RATIO for ratio in ratios)
    return Verdict(aim, "; ".join(shown), False if missed else True if all(ratios) else None)


def systems(content: Content) -> list[Row]:
    """Returns a row for each system of section baselines, number of streams and history.

    A system that computes one request at a time takes the time of one stream for each stream.
    """
    rows = list(rows_of(content, "baselines").values())
    errors = {row["system"]: row["mel_error"] for row in rows if "mel_error" in row}
    timed = [row for row in rows if "total_ms" in row]
    counts = sorted({row["streams"] for row in timed})
    table_rows = []
    for row in timed:
        alone = row["one at a time"]
        for streams in counts if alone else [row["streams"]]:
            ms = row["total_ms"][0] * (streams if alone else 1)
            rate = streams * row["hop_tokens"] / PACE * 1000 / ms
            table_rows.append(
                {
                    "system": row["system"],
                    "streams": streams,
                    "after (s)": row["spoken_s"],
                    "ms": ms,
                    "times real time": rate,
                    "error of the mel": errors.get(row["system"]),
                }
            )
    return sorted(table_rows, key=itemgetter("after (s)", "streams"))


def _real_time(content: Content) -> Iterator[Verdict]:
    """Yields verdicts on the engine's number of streams and the server's number of clients."""
    trials = [row for row in rows_of(content, "streams").values() if "unbroken" in row]
    streams = [(row["streams"], row["setting"], row["unbroken"] >= UNBROKEN) for row in trials]
    aim = f"{STREAMS} streams of 20 s in real time, {UNBROKEN:.0%} of them unbroken, at the engine"
    yield _held(content, "streams", aim, streams)
    rows = [row for row in rows_of(content, "server").values() if row["rate"] == PACE]
    shares = [row["share_without_gaps"]["0.05 s"] * (not row["failed"]) for row in rows]
    clients = [
        (row["clients"], "lean", share >= UNBROKEN) for row, share in zip(rows, shares, strict=True)
    ]
    aim = f"{STREAMS} clients at the pace of a language model through the server"
    yield _held(content, "server", aim, clients)


def _held(
    content: Content, section: str, aim: str, trials: Sequence[tuple[int, str, bool]]
) -> Verdict:
    """Judges the largest number that was held. Only the leanest setting can miss the aim.

    Args:
        trials: each number, its setting, and whether it was held.
    """
    none = (0, "no number of streams was reached", True)
    best, setting, _ = max((trial for trial in trials if trial[2]), default=none)
    lean = [number for number, setting, held in trials if setting == "lean" and not held]
    missed = min(lean, default=None)
    measured = f"{best} ({setting}); too many, with the leanest setting: {missed or 'not shown'}"
    met = best >= STREAMS or (False if missed and missed <= STREAMS else None)
    return Verdict(f"at least {aim}", measured if trials else _why(content, section), met)


def _why(content: Content, section: str, key: str | None = None) -> str:
    """Returns the reason in the results why a section has no such row."""
    rows = [
        row for row in content["rows"] if row["section"] == section and key in (row["key"], None)
    ]
    reasons = [row["left_out"] or row["problem"] for row in rows]
    reasons += [row["problem"] for row in content["sections"] if row["section"] == section]
    return next(filter(None, reasons), "did not run")


def markdown(content: Content) -> str:
    """Returns the whole page."""
    facts, small = content["facts"], rehearsed(content)
    left_out = [
        {name: row[name] for name in _COMMON[:4]} for row in content["rows"] if row["left_out"]
    ]
    parts = [
        f"# {'Rehearsal: ' if small else ''}{facts.get('gpu') or 'no GPU'}",
        "These figures show that the report works; they do not show the speed of any GPU."
        if small
        else "",
        "; ".join(f"{name} {_cell(value)}" for name, value in facts.items() if value is not None),
        table(
            {"aim": verdict.aim, "measured": verdict.measured, "": WORDS[verdict.met]}
            for verdict in verdicts(content)
        ),
        "## Faults\n\n" + ("\n".join(f"- {fault}" for fault in faults(content)) or "None."),
        f"## Left out\n\n{table(left_out)}",
        f"## Sections\n\n{table(content['sections'])}",
    ]
    for name in SECTIONS:
        if rows := rows_of(content, name):
            parts += [f"## {name}", *_tables(rows)]
    if compared := systems(content):
        parts += ["## systems side by side", table(compared)]
    parts += ["## Runs", table(content.get("runs", []))]
    return "\n\n".join(filter(None, parts)) + "\n"


def timed_chunks(content: Content) -> list[Row]:
    """Returns the rows of chunks with pages of the default type."""
    rows = rows_of(content, "chunks").items()
    return [row for key, row in rows if "total_ms" in row and " pages" not in key]


def _tables(rows: Mapping[str, Row]) -> Iterator[str]:
    """Yields one table for each group of rows with the same values, without long lists."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for key, row in rows.items():
        shown = {"": key} | {
            column: value for column, value in row.items() if column not in (*_COMMON, *_LONG)
        }
        groups.setdefault(tuple(shown), []).append(shown)
    yield from map(table, groups.values())


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Formats rows with the same keys as a table; the keys are the column heads."""
    if not (rows := list(rows)):
        return "Nothing."
    lines = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *([_cell(value) for value in row.values()] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{name} {_cell(item)}" for name, item in value.items() if item is not None
        )
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3e}"
    return "-" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def write_report(content: Content, out: Path) -> None:
    """Writes report.md, and report.json for `token2wav plan --costs`."""
    out.mkdir(parents=True, exist_ok=True)
    timed = timed_chunks(content)
    (out / "report.md").write_text(markdown(content))
    case = {
        "engine": "torch",
        "precision": content["facts"]["precision"],
        "graphs": content["facts"]["graphs"],
    }
    results = [{"model": content["facts"]["size"], "case": case, "rows": timed}]
    write_json(out / "report.json", {**content["facts"], "results": results, **content})
