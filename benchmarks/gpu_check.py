"""Everything that only a GPU can show, unattended: a report of sections, each in a process of its own.

Writes the results of every section as JSON as soon as there are any, and at the end report.md and two plots, into
benchmarks/results/gpu. Sections that have run before keep their results; name some to run only those, none to write the
report anew. Ends with 1 if a test failed, a result is beyond its bounds, or a section ended early. docs/gpu.md says how
to read it.

    make gpu-check
    make gpu-check ARGS="--sections chunks peer"
    python -m benchmarks.gpu_check --rehearse           # all of it in small, on a CPU
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.engines import model_folder
from benchmarks.environment import RESULTS, ROOT, describe
from benchmarks.gpu.plots import draw
from benchmarks.gpu.processes import run_section
from benchmarks.gpu.records import read_records
from benchmarks.gpu.report import markdown
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.settings import Settings, rehearsal
from benchmarks.gpu.verdicts import faults, verdicts
from benchmarks.models import SIZES
from token2wav.artifacts import Precision
from token2wav.engines.choice import EngineName


def positive(text: str) -> int:
    """For argparse, which says what is wrong with it."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def settings_of(options: argparse.Namespace) -> Settings:
    """What the command line asks for: the report, or its rehearsal, with whatever else it says."""
    on_cpu = options.rehearse or options.device == "cpu"
    out = options.out or (ROOT / "out" / "gpu_rehearsal" if on_cpu else RESULTS / "gpu")
    base = Settings(out, copy_mib=64, matrix=512) if on_cpu else Settings(out)
    base = rehearsal(out) if options.rehearse else base
    names = ("device", "engine", "precision", "size", "minutes")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    return replace(base, **given | ({"batches": tuple(options.batches)} if options.batches else {}))


def write_report(out: Path) -> list[str]:
    """Writes report.md and the plots from what there is, prints the aims, and returns the faults."""
    sections = read_records(out, list(SECTIONS))
    if not sections:
        return ["no section has run"]
    (out / "report.md").write_text(markdown(sections, draw(sections, out)))
    print()
    for verdict in verdicts(sections):
        print(f"{verdict.word:12}  {verdict.aim}: {verdict.measured}")
    found = faults(sections)
    print(*(f"fault: {fault}" for fault in found), f"{out / 'report.md'} and the sections' JSON", sep="\n")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with the tiny model and the least of all")
    parser.add_argument("--device", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--size", choices=[*SIZES, "full"], help="of the random model (default: full, the public one)")
    parser.add_argument("--engine", choices=get_args(EngineName), help="that is timed (default: torch)")
    parser.add_argument("--precision", choices=get_args(Precision), help="of it (default: float16 on a GPU)")
    parser.add_argument("--batches", type=positive, nargs="+", help="streams in the chunks that are timed")
    parser.add_argument("--minutes", type=float, help="after which a section is ended (default: 30)")
    parser.add_argument("--out", type=Path, help="folder (default: benchmarks/results/gpu, of a CPU out/gpu_rehearsal)")
    options = parser.parse_args()
    settings = settings_of(options)
    if options.sections and settings.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --rehearse runs the report in small on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the section that runs, too
    facts = describe() | {"size": settings.size}
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(Path(temporary), settings.size) if options.sections else Path(temporary)
        for name in options.sections:
            print(f"== {name}", flush=True)
            if problem := run_section(name, folder, settings, facts):
                print(f"{name}: {problem}", flush=True)
    return 1 if write_report(settings.out) else 0


if __name__ == "__main__":
    sys.exit(main())
