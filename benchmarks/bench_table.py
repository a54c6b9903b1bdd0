"""NVIDIA's table for five models: `token2wav bench` on a server of each, one after the other.

Codecs have their published sizes and random weights; speed does not depend on training. Server and
client share the cores. A row has a time limit, so the whole run takes at most a quarter of an hour:

    .venv/bin/python -m benchmarks.bench_table

Writes bench.json with the figures of all models, and bench_MODEL.npz with the recordings of each.
Prints the table for the README of the results; `--print` prints it from the committed file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from benchmarks.environment import RESULTS, describe, save
from benchmarks.open_loop import LABELS, Subject, model_folder
from token2wav_client.voice import FIELDS
from token2wav_server import Ports, TritonServer

MODELS = ("demo_voice", "demo_codec", "nanocodec", "mimi", "qwen3_tts")
STREAMS = (1, 4, 8, 16, 32, 64)
CONTINUOUS = 0.99  # least C200 of a row in real time
_COLUMNS = (
    "model",
    "streams",
    "first audio, ms: mean, p50, p90, p95, p99",
    "between chunks, ms",
    "RTFX",
    "C50, C100, C200",
    "cut (without audio)",
    "keeps up",
)


def keeps_up(row: Mapping[str, Any]) -> bool:
    """Returns whether a row served every stream at the pace of speech or faster, without stalls."""
    pace, continuity = row["rtfx_of_a_stream"], row["c200"]
    return (
        (pace or 0) >= 1 and not row["failed"] and (continuity is None or continuity >= CONTINUOUS)
    )


def as_markdown(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table of all models. The last column says whether this machine keeps up."""
    head = [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    return "\n".join([*head, *(line for name in models for line in _lines(name, models[name]))])


def _lines(name: str, report: Mapping[str, Any]) -> Iterator[str]:
    for row in report["rows"]:
        shares = [_or_dash(row[f"c{ms}"], lambda share: f"{share:.0%}") for ms in (50, 100, 200)]
        cells = (
            LABELS[name],
            row["streams"],
            *(_quantiles(row[figure]) for figure in ("first_audio_ms", "between_chunks_ms")),
            _or_dash(row["rtfx"], lambda value: f"{value:.1f}"),
            ", ".join(shares),
            f"{row['cut']} ({row['cut_without_audio']})",
            "yes" if keeps_up(row) else "no",
        )
        yield f"| {' | '.join(map(str, cells))} |"


def _quantiles(values: Mapping[str, float] | None) -> str:
    names = ("mean", "p50", "p90", "p95", "p99")
    return "-" if values is None else ", ".join(f"{values[name]:.0f}" for name in names)


def _or_dash(value: float | None, shown: Any) -> str:
    return "-" if value is None else str(shown(value))


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one model, and returns the report of `token2wav bench`."""
    with tempfile.TemporaryDirectory() as temporary:
        parent = Path(temporary)
        folder = model_folder(name, parent)
        out, config, arguments = parent / "bench.json", parent / "server.yaml", list[str]()
        # One stream more than the clients have, for the health checks of the launcher.
        config.write_text(f"limits: {{streams: {max(options.streams) + 1}}}\n")
        if (voice := Subject.of(folder, 1.0, 1.0).voice) is not None:
            file = parent / "voice.safetensors"
            save_file({field: getattr(voice, field) for field in FIELDS}, file)
            arguments += ["--voice", str(file)]
        with TritonServer(
            folder, config=config, ports=Ports.free(), log_file=parent / "triton.log"
        ) as server:
            command = [sys.executable, "-m", "token2wav", "bench", "--url", server.grpc_url]
            command += ["--streams", *map(str, options.streams), "--rounds", str(options.rounds)]
            command += ["--row-seconds", str(options.row_seconds), "--out", str(out)]
            subprocess.run([*command, *arguments], check=True)
        report: dict[str, Any] = json.loads(out.read_text())
        recordings = RESULTS / f"{options.name}_{name}.npz"
        recordings.write_bytes(out.with_suffix(".npz").read_bytes())
    del report["url"]  # a port of this machine
    return {**report, "recordings": recordings.name}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(LABELS), default=list(MODELS))
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--rounds", type=int, default=20, help="utterances of each stream")
    parser.add_argument("--row-seconds", type=float, default=18.0, help="time limit of a row")
    parser.add_argument("--name", default="bench", help="name of the result files")
    parser.add_argument("--print", action="store_true", help="only print the table of a result")
    options = parser.parse_args()
    if options.print:
        content = json.loads((RESULTS / f"{options.name}.json").read_text())
        print(as_markdown(content["models"]))
        return
    facts, models = describe("matplotlib"), dict[str, Any]()
    for name in options.models:
        print(LABELS[name], flush=True)
        models[name] = measure(name, options)
        save(options.name, {**facts, "models": models})  # after each model, because all take long
    print(as_markdown(models))


if __name__ == "__main__":
    main()
