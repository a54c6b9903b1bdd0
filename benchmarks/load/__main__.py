"""Load on a real server that this program starts, measured as listeners hear it.

The clients share the cores with the server. Each command prints a line for each load, and writes
JSON into benchmarks/results. docs/benchmarking.md defines the figures; `token2wav bench` measures a
server that runs already.

    open      utterances that start at random times
    closed    N clients, each of which begins its next utterance when the last one has ended

    .venv/bin/python -m benchmarks.load open --models demo_voice demo_codec --rates 1 2 4
    .venv/bin/python -m benchmarks.load open --models demo_voice --gateway
    .venv/bin/python -m benchmarks.load closed --models tiny --modes batching ensemble
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environment import describe, run_command, save
from benchmarks.load.clients import Load
from benchmarks.load.figures import LEAST_RATE, Row, as_line, highest_rate, next_rate
from benchmarks.load.measure import GATEWAY_MODEL, MODES, measure
from benchmarks.load.subject import CHOICES, LABELS, Subject, model_folder
from token2wav.config import LimitConfig

_LEAST_UTTERANCES = 6  # that are expected at a rate, which lengthens the runs of low rates


def add_options(closed: bool, parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    models = ["tiny"] if closed else list(LABELS)
    option("--models", nargs="+", default=models, metavar="NAME", help=CHOICES)
    if closed:
        option("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    else:
        option(
            "--rates",
            type=float,
            nargs="+",
            default=[0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
            help="utterances per second; a higher rate is skipped if a lower one had gaps, and "
            f"lower ones, down to {LEAST_RATE:g}, are added if the lowest one had gaps",
        )
    option(
        "--seconds",
        type=float,
        default=20.0,
        help="time in which utterances start; longer at low rates, so that "
        f"{_LEAST_UTTERANCES} utterances are expected",
    )
    option("--utterance-seconds", type=float, default=8.0 if closed else 6.0)
    option(
        "--speeds",
        type=float,
        nargs="+",
        default=[1.0, 0.0] if closed else [2.0],
        help="paces of the tokens, as multiples of speech; 0 sends all tokens at once",
    )
    option(
        "--portion-seconds",
        type=float,
        default=0.2 if closed else 0.0,
        help="audio of a message; 0 sends each token alone",
    )
    option(
        "--buffer-seconds",
        type=float,
        default=0.5 if closed else 0.2,
        help="seconds that a player waits after the first audio",
    )
    option(
        "--modes",
        nargs="+",
        choices=MODES,
        default=["batching"],
        metavar="MODE",
        help=str([*MODES]),
    )
    option("--config", type=Path, metavar="FILE", help="settings of the server")
    option(
        "--gateway",
        action="store_true",
        help="measure models with voices from the text, through a gateway",
    )


def loads(
    options: argparse.Namespace, subject: Subject, speed: float, rows: Sequence[Row]
) -> Iterator[Load]:
    """Yields the loads of a server. The next rate of an open loop depends on the rows so far."""
    load = Load(
        0,
        speed * subject.config.token_frame_rate,
        seconds=options.seconds,
        portion=subject.portion_tokens(options.portion_seconds),
        buffer_s=options.buffer_seconds,
    )
    if options.command == "closed":
        yield from (replace(load, clients=clients) for clients in options.clients)
        return
    while (rate := next_rate(options.rates, rows)) is not None:
        seconds = max(options.seconds, _LEAST_UTTERANCES / rate)
        yield replace(load, seconds=seconds, utterances_per_s=rate)


def run(options: argparse.Namespace) -> None:
    """Runs all loads. Raises ValueError if a gateway is to ask for a model that a mode lacks."""
    lacking = [mode for mode in options.modes if MODES[mode][1] != GATEWAY_MODEL]
    if options.gateway and lacking:
        raise ValueError(f"--gateway asks for {GATEWAY_MODEL}, which --modes {lacking[0]} lacks")
    settings = yaml.safe_load(options.config.read_text()) if options.config else {}
    limits: dict[str, Any] = {"player_buffer_seconds": options.buffer_seconds}
    if options.command == "closed":
        # The health checks of the launcher need streams too.
        limits["streams"] = max(LimitConfig().streams, max(options.clients) + 8)
    settings["limits"] = {**limits, **settings.get("limits", {})}
    facts, rows, highest = describe(), list[Row](), dict[str, float | None]()
    with tempfile.TemporaryDirectory() as temporary:
        for model in options.models:
            folder = model_folder(model, Path(temporary))
            subject = Subject.of(folder, options.utterance_seconds)
            if options.gateway and subject.voice is None:
                print(f"{model}: left out, because --gateway measures models with voices")
                continue
            for mode, speed in product(options.modes, options.speeds):
                measured = list[Row]()
                gateway_speed = speed if options.gateway else None
                runs = loads(options, subject, speed, measured)
                for result in measure(folder, mode, runs, subject, settings, gateway_speed):
                    measured.append({"model": model, **result})
                    print(as_line(measured[-1]), flush=True)
                rows += sorted(measured, key=itemgetter("utterances_per_s"))
                case = f"{model}, {mode}, {measured[0]['rate']:g} tokens/s"
                if options.command == "open":
                    highest[case] = highest_rate(measured)
            # After each model, because all models together take many minutes.
            save(options.name, {**facts, "highest_rate_without_gaps": highest, "rows": rows})
    if highest:
        print("highest rate without a gap:", highest)


def main() -> None:
    run_command(
        {
            "open": (partial(add_options, False), run, "open_loop"),
            "closed": (partial(add_options, True), run, "serving_load"),
        }
    )


if __name__ == "__main__":
    main()
