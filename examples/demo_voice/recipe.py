"""The whole recipe, from nothing to a model folder: `python -m examples.demo_voice.recipe --data DIR --budget 240`.

Every stage keeps what it made in the data folder: the same command again goes on where it was stopped, and trains on
from the last checkpoints. The flow and the vocoder are trained at the same time, as processes of their own.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from examples.demo_voice import corpus, front_end
from examples.demo_voice.export import MODEL, export
from examples.demo_voice.folder import CORPUS, FRONT_END, TRAINING
from examples.demo_voice.loss_plot import plot_losses

NETWORKS = ("flow", "hift")


@dataclass(frozen=True)
class Budget:
    """How much of everything.

    Attributes:
        sentences: to learn from; 1000 are about 50 minutes.
        rounds: of k-means.
        limit: of each training, as its arguments.
    """

    sentences: int
    rounds: int
    limit: tuple[str, str]

    @classmethod
    def of(cls, text: str) -> Budget:
        """`small`, which shows in a minute that all works, or minutes of training."""
        if text == "small":
            return cls(sentences=8, rounds=2, limit=("--steps", "40"))
        try:
            minutes = float(text)
        except ValueError:
            minutes = 0.0
        if not 0 < minutes < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is neither 'small' nor a positive number of minutes")
        return cls(sentences=2000, rounds=8, limit=("--minutes", text))


def main() -> None:
    """Runs all stages."""
    parser = argparse.ArgumentParser(description="Make the demo voice, from synthetic recordings to a model folder.")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="what is made on the way is kept here")
    parser.add_argument("--budget", type=Budget.of, required=True, help="minutes of training, or 'small' for a minute")
    parser.add_argument("--out", type=Path, default=MODEL, metavar="DIR", help="model folder (default: the demo's)")
    parser.add_argument("--workers", type=int, default=2, help="processes that make recordings (default: 2)")
    options = parser.parse_args()
    budget: Budget = options.budget

    corpus.grow(options.data / CORPUS, budget.sentences, options.workers)
    front_end.learn(options.data / FRONT_END, corpus.read(options.data / CORPUS), budget.rounds)
    _train(options.data, budget)
    plot_losses(options.data / TRAINING)
    export(options.data, options.out)
    print(f"recipe: {options.out}")


def _train(data: Path, budget: Budget) -> None:
    """Both trainings side by side; SIGTERM and Ctrl-C let them save and end."""
    command = [sys.executable, "-m", "examples.demo_voice.train"]
    running = [subprocess.Popen([*command, name, "--data", str(data), *budget.limit]) for name in NETWORKS]

    def stop(number: int, _: object) -> None:
        for process in running:
            process.send_signal(number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    failed = [process.args for process in running if process.wait()]
    for number, handler in previous.items():
        signal.signal(number, handler)
    if failed:
        sys.exit(f"recipe: {len(failed)} of {len(running)} trainings failed")


if __name__ == "__main__":
    main()
