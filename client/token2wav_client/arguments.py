"""Parser of command lines that reports an error in one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's arguments that reports an error in one line.

    The line points at `--help` and replaces argparse's full usage text. Parsers of subcommands have
    the same class. The library has a similar parser, but this package does not import the library.
    """

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
