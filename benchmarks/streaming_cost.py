"""Cost of a chunk from the cache, compared with recomputing the whole history on the same weights.

Streams of several lengths run both ways, each in its own process, so that the peak memory is of one
stream alone. A further stream with a window is very long, and shows that neither time nor memory
grows. Prints a line for each finished stream; writes JSON and a plot.

    .venv/bin/python -m benchmarks.streaming_cost
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import RESULTS, describe, save, save_picture
from testkit.models.sized import SIZES, a_voice, random_model
from token2wav import StreamConfig, Token2Wav

mpl.use("Agg")
from matplotlib import pyplot as plt

WINDOWED = "incremental, left_blocks=8"
MODES: dict[str, StreamConfig] = {
    "incremental": StreamConfig(first_tokens=0),
    WINDOWED: StreamConfig(first_tokens=0, left_blocks=8),
    "recompute": StreamConfig(reference=True),
}


@dataclass
class Run:
    """Run of one stream.

    Attributes:
        position_s: end of every chunk in the utterance.
        flow_s, vocoder_s: time of every chunk in the flow and in the vocoder.
        rss_mib: memory of the process after every chunk, without the loaded model.
        peak_mib: largest memory, also within chunks.
        flow_totals_s: flow time of all repetitions. This run is their median.
    """

    model: str
    mode: str
    seconds: int
    position_s: list[float] = field(default_factory=list)
    flow_s: list[float] = field(default_factory=list)
    vocoder_s: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    flow_totals_s: list[float] = field(default_factory=list)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def timed(engine: Any) -> list[float]:
    """Returns a list to which every later call of the engine's `advance` adds its seconds."""
    seconds, advance = list[float](), engine.advance

    def measured(batch: Any) -> Any:
        start = time.perf_counter()
        result = advance(batch)
        seconds.append(time.perf_counter() - start)
        return result

    engine.advance = measured
    return seconds


def run_stream(folder: Path, name: str, mode: str, seconds: int) -> Run:
    """Synthesizes `seconds` of random tokens, pushed one second at a time."""
    model = Token2Wav.load(folder, stream=MODES[mode])
    voice = a_voice(model.config)
    tokens = np.random.default_rng(0).integers(0, 6561, 25 * seconds)
    # warm-up: every chunk size once; also caches the prompt
    model.synthesize(tokens[:128], voice)
    before, run, samples = rss_mib(), Run(name, mode, seconds), 0
    flow_s, vocoder_s = timed(model.pipeline.flow), timed(model.pipeline.vocoder)
    with model.stream(voice) as stream:
        for batch in [*np.split(tokens, seconds), None]:
            for chunk in stream.finish() if batch is None else stream.push(batch):
                samples += len(chunk.audio)
                run.position_s.append(round(samples / model.config.sample_rate, 2))
                run.rss_mib.append(round(rss_mib() - before, 1))
    run.peak_mib = round(peak_mib() - before, 1)
    run.flow_s = [round(value, 5) for value in flow_s]
    run.vocoder_s = [round(value, 5) for value in vocoder_s]
    return run


def run_job(job: tuple[Path, str, str, int]) -> Run:
    return run_stream(*job)


def median_run(runs: list[Run]) -> Run:
    """Returns the repetition in the middle by flow time."""
    ranked = sorted(runs, key=lambda run: sum(run.flow_s))
    middle = ranked[len(ranked) // 2]
    middle.flow_totals_s = [round(sum(run.flow_s), 3) for run in runs]
    return middle


HEAD = (
    f"{'model':13} {'mode':27} {'audio s':>7} {'flow s':>8} {'vocoder s':>9} "
    f"{'last chunk ms':>13} {'peak MiB':>8}"
)


def row(run: Run) -> str:
    last = 1000 * (run.flow_s[-2] + run.vocoder_s[-2])  # the last chunk is shorter
    return (
        f"{run.model:13} {run.mode:27} {run.seconds:7} {sum(run.flow_s):8.2f} "
        f"{sum(run.vocoder_s):9.2f} "
        f"{last:13.0f} {run.peak_mib:8.0f}"
    )


def plot(runs: list[Run], path: Path) -> None:
    """Draws compute per second of audio over the position, for the longest streams.

    The last picture shows cost and memory of the endless stream.
    """
    *finite, endless = runs
    models = list(dict.fromkeys(run.model for run in finite))
    figure, axes = plt.subplots(
        1, len(models) + 1, figsize=(5 * len(models) + 5, 4), layout="constrained"
    )
    for axis, model in zip(axes, models, strict=False):
        for mode in MODES:
            run = max(
                (run for run in finite if (run.model, run.mode) == (model, mode)),
                key=lambda run: run.seconds,
            )
            axis.plot(run.position_s[1:-1], cost(run)[1:-1], label=mode)
        axis.set_title(f"{model} model", fontsize=10)
        axis.legend()
    axes[-1].plot(endless.position_s[1:-1], cost(endless)[1:-1], label="compute")
    axes[-1].set_title(f"{endless.model}, {endless.mode}", fontsize=10)
    memory = axes[-1].twinx()
    memory.plot(endless.position_s, endless.rss_mib, color="tab:red", label="memory")
    memory.set_ylabel("memory beyond the model (MiB)", color="tab:red")
    memory.set_ylim(0, 2 * max(endless.rss_mib))
    for axis in axes:
        axis.set_xlabel("position in the stream (s)")
        axis.set_ylabel("compute per second of audio (s)")
        axis.set_ylim(bottom=0)
    save_picture(figure, path, dpi=110)


def cost(run: Run) -> NDArray[np.float64]:
    """Returns seconds of compute per second of audio, chunk by chunk."""
    return (np.array(run.flow_s) + run.vocoder_s) / np.diff([0.0, *run.position_s])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--seconds",
        type=int,
        nargs="+",
        default=[10, 30, 60, 120],
        help="seconds of audio of each stream",
    )
    parser.add_argument(
        "--endless",
        type=int,
        default=1200,
        help="seconds of one additional stream with a window, of the first model",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="number of runs of every stream; the run with the median flow time is reported",
    )
    parser.add_argument("--name", default="streaming_cost", help="name of the result files")
    options = parser.parse_args()
    if min(options.endless, *options.seconds) < 1:
        parser.error("--seconds and --endless: must be at least 1 second")
    with tempfile.TemporaryDirectory() as temporary:
        folders = {
            name: random_model(Path(temporary) / name, SIZES[name]) for name in options.models
        }
        jobs = [
            (folders[name], name, mode, seconds)
            for name in folders
            for seconds in options.seconds
            for mode in MODES
        ]
        first = options.models[0]
        jobs.append((folders[first], f"{first}, endless", WINDOWED, options.endless))
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
            print(HEAD, flush=True)
            repetitions: list[list[Run]] = [[] for _ in jobs]
            # Jobs take turns, so that changes in the speed of the machine affect all jobs alike.
            for index, run in enumerate(processes.imap(run_job, jobs * options.repeats)):
                repetitions[index % len(jobs)].append(run)
                print(row(run), flush=True)
            runs = [median_run(repeated) for repeated in repetitions]
    save(options.name, {"environment": describe(), "runs": [asdict(run) for run in runs]})
    plot(runs, RESULTS / f"{options.name}.png")


if __name__ == "__main__":
    main()
