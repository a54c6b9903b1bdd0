"""Parser of the command line whose errors are one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's arguments: an error is one line that points at `--help`, instead of the
    whole usage.

    Parsers of subcommands have the same class. The library has a parser like it, which this package
    does not import.
    """

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
