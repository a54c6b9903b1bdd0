"""Parser of command lines that prints errors as one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's arguments. An error is one line that names `--help`, without the usage.

    Parsers of subcommands have the same class. The client has a similar parser of its own, because
    it does not import the library.
    """

    def error(self, message: str) -> NoReturn:
        """Prints the error, and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
