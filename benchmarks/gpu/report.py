"""The report as markdown, from the sections' records alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from benchmarks.gpu.verdicts import Sections, faults, rehearsed, verdicts

_MOST_FAULTS = 20


def markdown(sections: Sections, plots: Iterable[str] = ()) -> str:
    """The whole page.

    Args:
        sections: their records by name.
        plots: names of images beside it.
    """
    parts = [_head(sections), _verdicts(sections), _faults(sections)]
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in plots]
    for name, section in sections.items():
        body = [_TEXTS[name](section)] if name in _TEXTS else []
        if section["problem"]:
            body.insert(0, f"**Ended early:** {section['problem']}")
        took = f"{section['took_s']:g} s" if "took_s" in section else "unknown time"
        parts.append("\n\n".join([f"## {name}", f"{section['date']}, commit {section['commit']}, {took}:", *body]))
        parts.append(f"    {section['command']}")
    return "\n\n".join(part for part in parts if part) + "\n"


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows with the same keys, which head the columns."""
    rows = list(rows)
    if not rows:
        return "Nothing."
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 100 else f"{value:.0f}"
    return "-" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _head(sections: Sections) -> str:
    facts = next(iter(sections.values()), {})
    rehearsal = "Rehearsal: " if rehearsed(sections) else ""
    if facts.get("gpu"):
        title = f"# {rehearsal}{facts['gpu']}"
        host = (
            f"Driver {facts['driver']}, CUDA {facts['cuda']}, torch {facts['packages']['torch']}, "
            f"{facts['memory_mib']} MiB, {facts['size']} model with random weights, {facts['cpus']} CPU cores "
            f"({facts['processor']})."
        )
    else:
        title = f"# {rehearsal}no GPU"
        host = (
            f"No GPU was there: torch {facts.get('packages', {}).get('torch')}, the {facts.get('size')} model. These "
            "figures say that the report works, and nothing about any GPU."
        )
    mixed = {section.get("gpu") for section in sections.values()}
    warning = f"\n\n**Sections are of different devices: {', '.join(map(str, mixed))}.**" if len(mixed) > 1 else ""
    return f"{title}\n\n{host}{warning}"


def _verdicts(sections: Sections) -> str:
    rows = [{"aim": each.aim, "measured": each.measured, "": each.word} for each in verdicts(sections)]
    return f"## Aims\n\n{table(rows)}"


def _faults(sections: Sections) -> str:
    found = faults(sections)
    lines = [f"- {fault}" for fault in found[:_MOST_FAULTS]]
    if len(found) > _MOST_FAULTS:
        lines.append(f"- and {len(found) - _MOST_FAULTS} more, in the sections' JSON")
    return "## Faults\n\n" + ("\n".join(lines) or "None.")


def _tests(section: Mapping[str, Any]) -> str:
    if "tests" not in section:
        return ""
    counts = f"{section['tests']} tests with the mark `gpu`, {section['skipped']} skipped"
    return f"{counts}, {len(section.get('failed', []))} failed."


def _floor(section: Mapping[str, Any]) -> str:
    if "operations_per_s" not in section:
        return ""
    memory = ", ".join(f"{name} {rate / 1e12:.3f} TB/s" for name, rate in section["bytes_per_s"].items())
    products = ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in section["operations_per_s"].items())
    rows = [
        {
            "streams": row["streams"],
            "after (s)": row["spoken_s"],
            "tokens": row["hop_tokens"],
            "floor (ms)": row["floor_ms"],
            "flow: memory, arithmetic": f"{row['flow_memory_ms']:.3f}, {row['flow_arithmetic_ms']:.3f}",
            "vocoder: memory, arithmetic": f"{row['vocoder_memory_ms']:.3f}, {row['vocoder_arithmetic_ms']:.3f}",
        }
        for row in section.get("rows", [])
    ]
    return f"Memory: {memory}. Matrix products, TFLOP/s: {products}.\n\n{table(rows)}"


def _parity(section: Mapping[str, Any]) -> str:
    rows = []
    for result in section.get("engines", []):
        case, found = result["case"], result["verification"] or {}
        rows.append(
            {
                "engine": f"{case['engine']} {case['precision']}{'' if case['graphs'] else ', no graphs'}",
                "mel (dB)": found.get("mel_db"),
                "vocoder, largest": found.get("vocoder_max"),
                "audio SNR (dB)": found.get("audio_snr_db"),
                "": result["problem"] or "; ".join(found.get("failures", [])) or "within all bounds",
            }
        )
    buckets = []
    for precision in dict.fromkeys(row["precision"] for row in section.get("buckets", [])):
        own = [row for row in section["buckets"] if row["precision"] == precision]
        buckets.append(
            {
                "precision": precision,
                "shapes and fillings": len(own),
                **{
                    f"largest, {name}": max(row.get(name, 0.0) for row in own) for name in ("mel", "contexts", "stored")
                },
                "bound": own[0]["bound"],
                "beyond it": sum(row["problem"] is not None for row in own),
            }
        )
    batches = [
        {
            "streams": row["streams"],
            "engine": f"{row['engine']} {row['precision']}",
            "mel, relative": row["mel"],
            "audio, largest": row["audio"],
            "": row["note"],
        }
        for row in section.get("batches", [])
    ]
    parts = [
        table(rows),
        "Batches, against each of their streams alone on torch in float32 without graphs:",
        table(batches),
        "Captured shapes, against the unpadded solver in float32:",
        table(buckets),
    ]
    return "\n\n".join(parts)


def _chunks(section: Mapping[str, Any]) -> str:
    rows = [
        {
            "streams": row["streams"],
            "after (s)": row["spoken_s"] or "first chunk",
            "tokens": row["hop_tokens"],
            "flow (ms)": row["flow_ms"][0],
            "vocoder (ms)": row["vocoder_ms"][0],
            "sum: median": row["total_ms"][0],
            "least to most": f"{row['total_ms'][1]:g} to {row['total_ms'][2]:g}",
            "floor (ms)": row["floor_ms"],
            "times floor": row["ratio"],
        }
        for row in section.get("rows", [])
    ]
    missing = [
        {"streams": row["streams"], "after (s)": row["spoken_s"], "tokens": row["hop_tokens"], "why": row["problem"]}
        for row in section.get("missing", [])
    ]
    parts = [table(rows)]
    if missing:
        parts += ["Not measured:", table(missing)]
    return "\n\n".join(parts)


def _peer(section: Mapping[str, Any]) -> str:
    return table(
        {
            "after (s)": row["spoken_s"],
            "recomputed, one by one (ms)": row["recompute_ms"][0] if row["recompute_ms"] else row["problem"],
            "chunks/s": row["recompute_per_s"],
            f"{row['streams']} streams in a batch (ms)": row["batch_ms"][0] if row["batch_ms"] else row["problem"],
            "chunks/s together": row["batch_per_s"],
            "times as many": row["ratio"],
        }
        for row in section.get("rows", [])
    )


def _streams(section: Mapping[str, Any]) -> str:
    rows = []
    for row in section.get("capacity", []):
        at = row.get("at", {})
        first = at.get("first_audio_ms") or {}
        rows.append(
            {
                "served with": row["setup"],
                "streams": row["problem"] or f"{'at least ' if row['at_least'] else ''}{row['streams']}",
                "first audio p50, p99 (ms)": f"{first.get('p50', '-')}, {first.get('p99', '-')}",
                "mean batch": at.get("mean_batch"),
                "cache per stream (MiB)": at.get("cache_mib_per_stream"),
                "other memory per stream (MiB)": at.get("other_mib_per_stream"),
                "cache (MiB)": row.get("cache_mib"),
            }
        )
    return f"{table(rows)}\n\nA window is an approximation: docs/tuning.md."


def _profile(section: Mapping[str, Any]) -> str:
    return "\n\n".join(_profiled(each) for each in section.get("profiles", []))


def _profiled(found: Mapping[str, Any]) -> str:
    head = (
        f"{found['streams']} streams, {found['hop_tokens']} tokens after {found['spoken_s']:g} s: "
        f"{found['wall_ms']:.2f} ms under the profiler, {found['calls']} calls."
    )
    shares = table([{kind: f"{share:.1%}" for kind, share in found["shares"].items()}])
    top = [
        {"": f"`{row['name']}`", "ms": row["ms"], "calls": row["calls"], "share": f"{row['share']:.1%}"}
        for row in found["top"]
    ]
    return f"{head}\n\n{shares}\n\n{table(top)}"


def _server(section: Mapping[str, Any]) -> str:
    rows = [
        {
            "load": row["load"],
            "utterances": row["utterances"],
            "first audio p50, p99 (ms)": f"{row['first_audio_ms']['p50']:g}, {row['first_audio_ms']['p99']:g}",
            "without gaps over 50 ms": f"{row['share_without_gaps']['0.05 s']:.1%}",
            "audio per second (s)": row["audio_seconds_per_second"],
            "mean batch": row["mean_batch"],
            "failed": "; ".join(row["failed"]) or "none",
        }
        for row in section.get("rows", [])
    ]
    return "\n\n".join([table(rows), *_perf_analyzer(section.get("perf_analyzer") or {})])


def _perf_analyzer(found: Mapping[str, Any]) -> Iterator[str]:
    if found.get("problem"):
        yield f"perf_analyzer: {found['problem']}"
    heard = [row for row in found.get("rows", []) if not row["failed"]]
    if heard:
        yield "perf_analyzer:"
        yield table(
            {
                "load": row["load"],
                "utterances": row["heard"]["utterances"],
                "first audio p50, p99 (ms)": f"{row['heard']['first_audio_ms']['p50']:g}, "
                f"{row['heard']['first_audio_ms']['p99']:g}",
                "without underrun": f"{row['heard']['share_without_underrun']:.1%}",
                "audio per second (s)": row["heard"]["audio_seconds_per_second"],
            }
            for row in heard
        )


_TEXTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "tests": _tests,
    "floor": _floor,
    "parity": _parity,
    "chunks": _chunks,
    "peer": _peer,
    "streams": _streams,
    "profile": _profile,
    "server": _server,
}
