"""Command line and report of a soak, as the soaks of the server and of the gateway have them."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

Answers = dict[str, dict[str, dict[str, int]]]  # counts by kind and name of a misdeed, and answer


def soak_parser(
    description: str | None, *, minutes: float, clients: int
) -> argparse.ArgumentParser:
    """Makes a parser of the options of all soaks, with their defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--clients", type=int, default=clients)
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**32), help="random by default"
    )
    return parser


def as_table(misdeeds: Counter[tuple[str, str, str]]) -> Answers:
    """Counts each answer by kind and name of the misdeed."""
    table: Answers = {}
    for (kind, name, answer), count in sorted(misdeeds.items()):
        table.setdefault(kind, {}).setdefault(name, {})[answer] = count
    return table


def misdeed_lines(misbehaved: Answers, width: int) -> list[str]:
    """Returns a line for each kind of misdeed, which is padded to a width."""
    return [
        f"{kind:{width}} {sum(sum(answers.values()) for answers in names.values()):4} times in "
        f"{len(names)} ways"
        for kind, names in misbehaved.items()
    ]


def exit_with_problems(problems: list[str], seed: int) -> None:
    """Prints all problems with the seed and exits with 1, if there are any."""
    if problems:
        sys.exit("\n".join([f"seed {seed}: {len(problems)} problems", *problems]))
