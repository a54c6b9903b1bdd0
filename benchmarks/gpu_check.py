"""Report of all facts that only a GPU can show, measured unattended in slices of some minutes.

docs/gpu.md describes the report. The project need not be installed. A slice writes results.json
after every row and report.md after every section, and ends by itself. Without --slice and
--section, all slices run one after the other and their results are merged. The exit status is 1 if
a test failed, a result is beyond its bounds, or a section ended early. Slow results do not change
the exit status.

    python3 -m benchmarks.gpu_check --slice 1 --out out/1      # then 2 and 3
    python3 -m benchmarks.gpu_check --merge out/1 out/2 out/3 --out out/report
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environment import RESULTS as PUBLISHED
from benchmarks.environment import ROOT, describe, program_parser

_PATHS = [str(ROOT / name) for name in ("", "client", "exporters", "server")]
sys.path += [path for path in _PATHS if path not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*_PATHS, os.environ.get("PYTHONPATH")]))

import torch  # noqa: E402 (the path comes first)

if not torch.cuda.is_available():  # before the Triton language is imported
    os.environ["TRITON_INTERPRET"] = "1"

from benchmarks.gpu.report import WORDS, faults, markdown, merge, verdicts, write_report  # noqa: E402
from benchmarks.gpu.settings import (  # noqa: E402
    LAST_S,
    MINUTES,
    REHEARSAL_MINUTES,
    RESULTS,
    SECTIONS,
    SLICES,
    Settings,
)
from benchmarks.gpu.worker import LOG, Results, run_section, without_folders  # noqa: E402
from testkit.models.sized import TEMPLATE, model_folder  # noqa: E402
from token2wav.config.values import from_mapping  # noqa: E402
from token2wav.errors import ConfigError  # noqa: E402
from token2wav.execution.cuda_graphs import SWITCH  # noqa: E402

# name of a section, its time limit in seconds, and its settings
Part = tuple[str, float, Settings]


def parts_of(number: int, settings: Settings, overrides: dict[str, Any]) -> list[Part]:
    """Returns the sections of a slice with their settings.

    Settings of the user (`overrides`) override the changes of the slice. A rehearsal takes only
    `setting` and `products` from these changes.
    """
    full, rehearsed = settings.size == "full", ("setting", "products")
    return [
        (
            name,
            seconds,
            replace(
                settings,
                **{key: value for key, value in changes.items() if full or key in rehearsed},
                **overrides,
            ),
        )
        for name, seconds, changes in SLICES[number]
    ]


def run(parts: list[Part], settings: Settings, minutes: float) -> None:
    """Runs sections in order within a time limit, and writes their results into `settings.out`.

    With more minutes than `MINUTES`, every section gets more time in proportion.
    """
    deadline, out = time.monotonic() + 60 * minutes - LAST_S, settings.out
    stretch = max(1.0, minutes / MINUTES)
    out.mkdir(parents=True, exist_ok=True)
    for path in (out / LOG, *out.glob("trace-*.json.gz")):
        path.unlink(missing_ok=True)
    facts = describe("triton", "onnxruntime", "tensorrt") | {
        "size": settings.size,
        "precision": settings.precision,
    }
    facts["graphs"] = os.environ.get(SWITCH, "1") != "0"
    query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    # nvidia-smi may be missing
    answer = subprocess.run(query, shell=True, capture_output=True, text=True, check=False)
    facts["command"] = without_folders(facts["command"])
    results = Results(out / RESULTS, facts | {"driver": answer.stdout.strip() or None, "gpu": None})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / settings.size
        if settings.size == "tiny":  # a copy, because section engines writes into the folder
            shutil.copytree(TEMPLATE.parent, folder)
        else:
            model_folder(folder.parent, settings.size)
        for name, seconds, part_settings in parts:
            left = deadline - time.monotonic()
            run_section(
                name, folder, part_settings, results, max(0.0, min(stretch * seconds, left))
            )
            (out / "report.md").write_text(markdown(results.content))


def measure(options: argparse.Namespace, out: Path) -> list[Path]:
    """Runs the slices or sections that the options select, and returns the folders of results."""
    overrides = {
        name: yaml.safe_load(value)
        for name, _, value in (change.partition("=") for change in options.set)
    }
    checked = from_mapping(Settings, overrides, "--set")
    overrides = {name: getattr(checked, name) for name in overrides}
    device = overrides.get(
        "device", "cuda" if torch.cuda.is_available() or not options.rehearse else "cpu"
    )
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            "torch finds no CUDA device; --rehearse runs a small version of the report on a CPU"
        )
    settings = Settings(out, device)
    settings = settings.rehearsal() if options.rehearse else settings
    if options.section:
        changed, seconds = replace(settings, **overrides), 60 * MINUTES / len(options.section)
        run([(name, seconds, changed) for name in options.section], changed, options.minutes)
        return [out]
    folders = (
        {options.slice: out}
        if options.slice
        else {number: out / f"slice-{number}" for number in SLICES}
    )
    for number, folder in folders.items():
        slice_settings = replace(settings, out=folder)
        run(
            parts_of(number, slice_settings, overrides),
            replace(slice_settings, **overrides),
            options.minutes,
        )
    return list(folders.values())


def main() -> int:
    parser = program_parser()
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--slice", type=int, choices=SLICES, help="slice of the report to run")
    selection.add_argument(
        "--section", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS)
    )
    selection.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="merge the results of several folders into one report",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the report (default: benchmarks/results/gpu; out/gpu for rehearsals)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="time limit of a slice in minutes (default: "
        f"{MINUTES:g}, or {REHEARSAL_MINUTES:g} for a rehearsal)",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run the smallest version of each section, with the tiny model",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="values that replace settings of benchmarks/gpu/settings.py",
    )
    options = parser.parse_args()
    options.minutes = options.minutes or (REHEARSAL_MINUTES if options.rehearse else MINUTES)
    out = options.out or (ROOT / "out" / "gpu" if options.rehearse else PUBLISHED / "gpu")
    # SystemExit also ends the running section.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        folders = options.merge or measure(options, out)
        content = merge(folders)
    except (ConfigError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))
    if folders != [out]:
        write_report(content, out)
    problems = faults(content)
    print(
        *(
            f"{WORDS[verdict.met]:9}  {verdict.aim}: {verdict.measured}"
            for verdict in verdicts(content)
        ),
        sep="\n",
    )
    print(*(f"fault: {fault}" for fault in problems), f"{out / 'report.md'}", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
