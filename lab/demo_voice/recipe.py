"""Recipe of the demo voice, which runs all stages.

    python -m lab.demo_voice.recipe --data DIR --budget 240

Every stage stores its results in the data folder. If you stop the command, run it again: it
continues, and trains from the last checkpoints. The ear is trained first, because all other
trainings use it, and then the tokenizer. The flow and the vocoder are trained at the same time, in
two processes. Last, the vocoder is trained alone, on mels that the flow makes.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lab.demo_voice import corpus, flow_mels, front_end
from lab.demo_voice.export import export
from lab.demo_voice.folder import CORPUS, FRONT_END, MODEL, TEMPLATE, TRAINING
from lab.demo_voice.loss_plot import plot_losses
from lab.demo_voice.training import averaged_weights, trained_steps
from token2wav.families.cosyvoice3 import CosyVoice3Config


@dataclass(frozen=True)
class Budget:
    """Budget of the recipe, which bounds every stage.

    Attributes:
        sentences: sentences to learn from; 1000 are about 46 minutes.
        ear_steps: training steps of the ear, which is then frozen.
        tokenizer_steps: training steps of the tokenizer, which is then frozen.
        limit: arguments that bound the trainings of flow and vocoder.
        flow_hours: hours of mel that the trained flow makes for the vocoder.
        last_limit: arguments that bound the last training of the vocoder, with mels of the flow.
        nice: niceness of the trainings; 19 is the lowest priority.
    """

    sentences: int
    ear_steps: int
    tokenizer_steps: int
    limit: tuple[str, str]
    flow_hours: float
    last_limit: tuple[str, str]
    nice: int

    @classmethod
    def of(cls, text: str) -> Budget:
        """Parses a budget: minutes of training, or `small`, which tests all stages."""
        if text == "small":
            return cls(
                sentences=8,
                ear_steps=20,
                tokenizer_steps=20,
                limit=("--steps", "20"),
                flow_hours=1 / 3600,
                last_limit=("--steps", "10"),
                nice=0,
            )
        minutes = positive_minutes(text)
        return cls(
            sentences=9200,
            ear_steps=2_700,
            tokenizer_steps=18_000,
            limit=("--minutes", text),
            flow_hours=1.0,
            last_limit=("--minutes", str(minutes / 4)),
            nice=19,
        )


def positive_minutes(text: str) -> float:
    """Parses the training time of a recipe."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither 'small' nor a positive number of minutes"
        )
    return minutes


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Create the demo voice, from synthetic recordings to a model folder."
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for intermediate results",
    )
    parser.add_argument(
        "--budget",
        type=Budget.of,
        required=True,
        help="training time in minutes, or 'small' for two minutes in total",
    )
    parser.add_argument(
        "--out", type=Path, default=MODEL, metavar="DIR", help="model folder (default: the demo's)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="number of processes that generate recordings (default: 2)",
    )
    options = parser.parse_args()
    budget: Budget = options.budget

    corpus.grow(options.data / CORPUS, budget.sentences, options.workers)
    _train_to(options.data, "ear", budget.ear_steps, budget.nice)
    _make_front_end(options.data, budget.tokenizer_steps, budget.nice)
    if not _train(options.data, ("flow", "hift"), budget.limit, budget.nice):
        flow_mels.make(options.data, budget.flow_hours)
        _train(options.data, ("hift",), budget.last_limit, budget.nice)
    plot_losses(options.data / TRAINING)
    export(options.data, options.out)
    print(f"recipe: {options.out}")


def _make_front_end(data: Path, steps: int, nice: int) -> None:
    """Trains the tokenizer and freezes it, unless the data folder has one."""
    if front_end.exists(data / FRONT_END):
        return
    _train_to(data, "tokenizer", steps, nice)
    weights, _ = averaged_weights(data / TRAINING, "tokenizer")
    front_end.save(data / FRONT_END, CosyVoice3Config.read(TEMPLATE).flow, weights)


def _train_to(data: Path, network: str, steps: int, nice: int) -> None:
    """Trains a network until it has this number of steps. Exits if the training is stopped."""
    missing = steps - trained_steps(data / TRAINING, network)
    if missing > 0 and _train(data, (network,), ("--steps", str(missing)), nice):
        sys.exit("recipe: stopped; run the same command to continue")


def _train(data: Path, networks: tuple[str, ...], limit: tuple[str, str], nice: int) -> bool:
    """Runs trainings at the same time. On SIGTERM and Ctrl-C they save a checkpoint and end.

    Returns:
        Whether one of these signals arrived.
    """
    command = [
        sys.executable,
        "-m",
        "lab.demo_voice.train",
        "--data",
        str(data),
        "--nice",
        str(nice),
        *limit,
    ]
    running = [subprocess.Popen([*command, name]) for name in networks]
    asked = []

    def stop(number: int, _: object) -> None:
        asked.append(number)
        for process in running:
            process.send_signal(number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    failed = [process.args for process in running if process.wait()]
    for number, handler in previous.items():
        signal.signal(number, handler)
    if failed:
        sys.exit(f"recipe: {len(failed)} of {len(running)} trainings failed")
    return bool(asked)


if __name__ == "__main__":
    main()
