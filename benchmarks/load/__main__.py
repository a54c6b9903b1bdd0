"""Load on a real server that this program starts, measured as listeners hear it.

The clients share the cores with the server. Each command prints a line for each load, and writes
JSON into benchmarks/results. docs/benchmarking.md defines the figures; `token2wav bench` measures a
server that runs already.

    open      utterances that start at random times, from tokens or (--gateway) from text
    closed    N clients, each of which begins its next utterance when the last one has ended

    .venv/bin/python -m benchmarks.load open --models demo_voice demo_codec --rates 1 2 4
    .venv/bin/python -m benchmarks.load open --models demo_voice --gateway
    .venv/bin/python -m benchmarks.load closed --model tiny --modes batching ensemble
"""

from __future__ import annotations

import argparse

from benchmarks.environment import run_command
from benchmarks.load import closed_loop, open_loop

# Options, function and result of each command.
COMMANDS = {
    "open": (open_loop.add_options, open_loop.main, "open_loop"),
    "closed": (closed_loop.add_options, closed_loop.main, "serving_load"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run_command(parser, COMMANDS)


if __name__ == "__main__":
    main()
