"""Table of kernel launches, bytes and floating-point operations of a chunk, and of the least time
and the expected time that they take on one H200.

The code itself is counted on torch's device `meta`, without a GPU: every model at its published
size, in float16, as a GPU runs it. Times are computed from rates (`launch.py`). A GPU has confirmed
them for CosyVoice3 only.

    .venv/bin/python -m lab.launches.table                              # two minutes
    .venv/bin/python -m lab.launches.table --families CosyVoice3 Mimi --streams 1 --spoken 0
    .venv/bin/python -m lab.launches.table --report benchmarks/results/gpu/report.json

The last command prints the computed times of the chunks of a report of `make gpu-check` beside the
measured times.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, describe, program_parser, save
from benchmarks.gpu.report import timed_chunks
from lab.launches.counted_chunks import HOST_US, SPOKEN_S, STREAMS, SUM, ChunkWork, chunk_works
from lab.launches.launch import CAPTURED_US, LOOSE_US, RATES
from lab.launches.launch_counter import ENCODER, OUTSIDE
from testkit.models.sized import public_configs
from token2wav.config.model_config import ModelConfig
from token2wav.kernels.tiles import table
from token2wav.published.window_config import WindowCodecConfig


def counted_configs() -> dict[str, ModelConfig]:
    """Makes the configuration of every streaming model at its published size, by names for tables.

    Decoders in windows, such as NeuCodec, are left out: the counter cannot replay their batches.
    """
    from testkit.models.published_codecs import codec_configs  # needs the folder of the tests

    return {
        name: config
        for name, config in (public_configs() | codec_configs()).items()
        if not isinstance(config, WindowCodecConfig)
    }


def columns(work: ChunkWork) -> dict[str, str]:
    """Returns the cells of a work in a table, by the heads of their columns."""
    counts = {name: f"{stage.launches:,}" for name, stage in work.stages.items()}
    parts = [stage for name, stage in work.stages.items() if name != SUM]
    total = work.stages[SUM]
    return {
        "family": work.family,
        "streams": str(work.streams),
        "tokens": str(work.hop_tokens),
        "after (s)": f"{work.spoken_s:g}" if work.spoken_s else "first",
        **{name: counts.get(name, "-") for name in (ENCODER, OUTSIDE, "flow")},
        "a step": f"{work.step_launches:,}" if work.step_launches else "-",
        "a layer": f"{work.layer_launches:,}" if work.layer_launches else "-",
        "vocoder, decoder": counts.get("vocoder", counts.get("decoder", "-")),
        SUM: counts[SUM],
        "GB": f"{total.bytes / 1e9:.1f}",
        "TFLOP": f"{sum(total.operations.values()) / 1e12:.2f}",
        "least ms": f"{total.least_ms:.1f}",
        "expected ms": f"{total.expected_ms:.1f}",
        "by stage": " + ".join(f"{stage.expected_ms:.1f}" for stage in parts),
    }


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Formats rows with the same keys as a table; the keys are the heads of the columns."""
    lines = [rows[0], dict.fromkeys(rows[0], "---"), *rows]
    return "\n".join(
        f"| {' | '.join(line if number == 0 else line.values())} |"
        for number, line in enumerate(lines)
    )


def beside_measured(chunks: Iterable[Mapping[str, Any]]) -> str:
    """Formats the launches and the computed times of measured chunks, with the measured times.

    Args:
        chunks: rows of section chunks of the GPU report, for CosyVoice3 at its public size.
    """
    rows = []
    for chunk in chunks:
        work = _work_like(chunk["streams"], chunk["hop_tokens"], chunk["spoken_s"])
        flow, vocoder, total = (chunk[name][0] for name in ("flow_ms", "vocoder_ms", "total_ms"))
        measured = {"measured ms": f"{total:.1f}", "flow + vocoder": f"{flow:.1f} + {vocoder:.1f}"}
        rows.append(columns(work) | measured)
    return markdown(rows)


@cache
def _work_like(streams: int, hop_tokens: int, spoken_s: float) -> ChunkWork:
    config = public_configs()["CosyVoice3"]
    [work] = chunk_works("CosyVoice3", config, (streams,), (spoken_s,), hop_tokens)
    return work


def main() -> None:
    parser = program_parser()
    configs = counted_configs()
    parser.add_argument("--families", nargs="+", choices=configs, default=list(configs))
    parser.add_argument("--streams", nargs="+", type=int, default=STREAMS, metavar="N")
    parser.add_argument(
        "--spoken",
        nargs="+",
        type=float,
        default=SPOKEN_S,
        metavar="S",
        help="seconds of speech before the chunk; 0 for a first chunk (default: 0 10)",
    )
    parser.add_argument(
        "--hop",
        type=int,
        default=0,
        metavar="N",
        help="new tokens of a chunk, in whole blocks (default: first hop of the model)",
    )
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N", help="ODE steps (default: those of the model)"
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="write the rows of the families into benchmarks/results/launches.json",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="report of CosyVoice3's public size in float16"
    )
    options = parser.parse_args()
    if find_spec("triton") is None:
        parser.error("the Triton language is not installed; run: pip install 'token2wav[gpu]'")
    if options.report:
        print(beside_measured(timed_chunks(json.loads(options.report.read_text()))))
        return
    works = [
        work
        for family in options.families
        for work in chunk_works(
            family,
            configs[family],
            options.streams,
            sorted(options.spoken),
            options.hop,
            options.steps,
        )
    ]
    print(markdown([columns(work) for work in works]))
    if unknown := {name for work in works for name in work.incomplete}:
        print(f"Bytes that these kernels read are not all counted: {', '.join(sorted(unknown))}")
    if options.save:
        assumed = {
            "rates": RATES,
            "captured_us": CAPTURED_US,
            "loose_us": LOOSE_US,
            "reads": asdict(table().rates),
            "host_us": HOST_US,
        }
        rows = [asdict(work) for work in works]
        for stage in (stage for row in rows for stage in row["stages"].values()):
            times = {name: round(stage[name], 3) for name in ("least_ms", "expected_ms")}
            stage |= {"bytes": round(stage["bytes"]), **times}
        # rows of families that were not counted now stay as they are
        saved = json.loads((RESULTS / "launches.json").read_text())["rows"]
        rows = [
            row
            for family in configs
            for row in (rows if family in options.families else saved)
            if row["family"] == family
        ]
        save("launches", {"environment": describe(), "assumed": assumed, "rows": rows})


if __name__ == "__main__":
    main()
