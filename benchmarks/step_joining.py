"""Is it worth letting a new stream join a running batch at its next ODE step?

Measures what a step and a vocoder call cost for batches of 1 to 8 chunks of 25 tokens, then replays the same arrivals
under three ways to run them, with those costs and a clock of its own:
  whole    a batch runs through all its steps; who comes meanwhile waits for the next one (what the scheduler does)
  join     who comes meanwhile joins at the next step, next to rows that are further on
  pause    as join, but rows whose listeners have audio pause while one that was not heard yet runs
Utterances start at random (Poisson) and get 25 tokens a second. Prints a line for each; writes JSON and a plot.

    .venv/bin/python -m benchmarks.step_joining
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib as mpl
import numpy as np
import torch

from benchmarks.environment import RESULTS, describe, save
from benchmarks.models import SIZES, random_model
from benchmarks.streaming_cost import prompt
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.policy import Policy, Ready

mpl.use("Agg")
from matplotlib import pyplot as plt

Way = Literal["whole", "join", "pause"]

HOP, LOOKAHEAD, RATE = 25, 3, 25.0
HELD_BACK_S = 0.16  # of audio, by the vocoder
BATCHES = (1, 2, 4, 8)
MOST = max(BATCHES)
STEPS = 10


@dataclass(frozen=True)
class Costs:
    """Seconds of one ODE step and of one vocoder call, by the size of the batch; between those measured, on a line."""

    step: dict[int, float]
    vocoder: dict[int, float]

    def of_step(self, rows: int) -> float:
        return float(np.interp(rows, list(self.step), list(self.step.values())))

    def of_vocoder(self, rows: int) -> float:
        return float(np.interp(rows, list(self.vocoder), list(self.vocoder.values())))

    @property
    def capacity(self) -> float:
        """Seconds of audio in a second, in full batches."""
        return MOST * HOP / RATE / (STEPS * self.of_step(MOST) + self.of_vocoder(MOST))


@dataclass(eq=False)
class Listener:
    """One utterance: what has arrived, and until when its player has audio."""

    arrives: float
    chunks: int
    buffer_s: float
    done: int = 0
    step: int = 0
    plays_until: float | None = None
    first_s: float = 0.0
    gaps: list[float] = field(default_factory=list)

    @property
    def ready_at(self) -> float:
        return self.arrives + (HOP * (self.done + 1) + LOOKAHEAD) / RATE

    def hear(self, now: float) -> None:
        audio = HOP / RATE
        if self.plays_until is None:
            self.first_s, self.plays_until, audio = now - self.ready_at, now + self.buffer_s, audio - HELD_BACK_S
        else:
            self.gaps.append(max(0.0, now - self.plays_until))
        self.plays_until = max(self.plays_until, now) + audio
        self.done, self.step = self.done + 1, 0


def replay(way: Way, costs: Costs, arrivals: list[float], chunks: int, buffer_s: float) -> list[Listener]:
    """Runs every utterance to its end."""
    listeners = [Listener(at, chunks, buffer_s) for at in arrivals]
    policy: Policy[Listener] = Policy(MOST)
    running: list[Listener] = []
    now = 0.0
    while open_ones := [listener for listener in listeners if listener.done < chunks]:
        if not running or way != "whole":
            waiting = [
                Ready(each, each.ready_at, each.plays_until, HOP)
                for each in open_ones
                if each.ready_at <= now and each not in running
            ]
            if len(running) < MOST:
                running += [chunk.owner for chunk in policy.next_batch(waiting, now)][: MOST - len(running)]
        if not running:
            now = min(listener.ready_at for listener in open_ones)
            continue
        unheard = [listener for listener in running if listener.plays_until is None]
        stepping = unheard if way == "pause" and unheard else running
        now += costs.of_step(len(stepping))
        for listener in stepping:
            listener.step += 1
        if through := [listener for listener in running if listener.step == STEPS]:
            now += costs.of_vocoder(len(through))
            for listener in through:
                listener.hear(now)
            running = [listener for listener in running if listener not in through]
    return listeners


def measure(folder: Path, repeats: int) -> Costs:
    """Costs on this host, of chunks that follow a first one; medians."""
    model = Token2Wav.load(folder, stream=StreamConfig(hop="fixed"), runtime=RuntimeConfig())
    voice = prompt(75)
    times: dict[int, list[tuple[float, float]]] = {count: [] for count in BATCHES}
    for _ in range(repeats):
        for count in BATCHES:
            sessions = [model.pipeline.open(voice) for _ in range(count)]
            for number in range(4):
                for session in sessions:
                    session.push(np.arange(HOP if number else HOP + LOOKAHEAD))
                model.pipeline.advance(sessions, lambda *stages, count=count: times[count].append(stages))
            for session in sessions:
                model.pipeline.close(session)
    medians = {count: np.median(np.array(own), axis=0) for count, own in times.items()}
    return Costs(
        {count: float(flow) / STEPS for count, (flow, _) in medians.items()},
        {count: float(vocoder) for count, (_, vocoder) in medians.items()},
    )


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    generator, at, arrivals = random.Random(seed), 0.0, []
    while (at := at + generator.expovariate(rate)) < seconds:
        arrivals.append(at)
    return arrivals


def row(way: Way, load: float, costs: Costs, options: argparse.Namespace) -> dict[str, Any]:
    rate = load * costs.capacity / options.utterance_seconds
    arrivals = poisson(rate, options.seconds, seed=0)
    chunks = round(options.utterance_seconds * RATE / HOP)
    listeners = replay(way, costs, arrivals, chunks, options.buffer_seconds)
    first = [1000 * listener.first_s for listener in listeners]
    late = [gap > 0 for listener in listeners for gap in listener.gaps]
    return {
        "way": way,
        "load": load,
        "arrivals_per_s": round(rate, 3),
        "utterances": len(listeners),
        "first_audio_ms": {f"p{q}": round(float(np.percentile(first, q)), 1) for q in (50, 90, 99)},
        "late_chunks": round(float(np.mean(late)), 4),
    }


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for way in get_args(Way):
        own = [row for row in rows if row["way"] == way]
        loads = [row["load"] for row in own]
        [line] = left.plot(loads, [row["first_audio_ms"]["p50"] for row in own], marker="o", label=f"{way}, p50")
        p99 = [row["first_audio_ms"]["p99"] for row in own]
        left.plot(loads, p99, "--", marker="^", color=line.get_color(), label=f"{way}, p99")
        right.plot(loads, [100 * row["late_chunks"] for row in own], marker="o", label=way)
    left.set_ylabel("first audio after its tokens (ms)")
    right.set_ylabel("chunks after their deadline (%)")
    for axis in (left, right):
        axis.set_xlabel("load, as a share of what full batches can serve")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", choices=SIZES)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.2, 0.4, 0.6, 0.8, 0.9])
    parser.add_argument("--seconds", type=float, default=600.0, help="of arrivals that are replayed")
    parser.add_argument("--utterance-seconds", type=float, default=8.0)
    parser.add_argument("--buffer-seconds", type=float, default=0.3, help="that a player waits after the first audio")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        costs = measure(random_model(Path(temporary) / "model", SIZES[options.model]), options.repeats)
    rows = [row(way, load, costs, options) for load in options.loads for way in get_args(Way)]
    for each in rows:
        first = each["first_audio_ms"]
        print(
            f"load {each['load']:.0%} {each['way']:6} first audio {first['p50']:6.0f} {first['p90']:6.0f} "
            f"{first['p99']:6.0f} ms, late chunks {each['late_chunks']:.1%}"
        )
    facts = describe()
    costs_ms = {
        name: {str(count): round(1000 * seconds, 2) for count, seconds in getattr(costs, name).items()}
        for name in ("step", "vocoder")
    }
    threads = torch.get_num_threads()
    save("step_joining", {**facts, "threads": threads, "model": options.model, "costs_ms": costs_ms, "rows": rows})
    title = f"replayed with the costs of the {options.model} model, CPU threads: {threads}"
    plot(rows, RESULTS / "step_joining.png", title)


if __name__ == "__main__":
    main()
