"""Parser of command lines whose errors are one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's arguments: an error is one line that points at `--help`, instead of the
    whole usage.

    Parsers of subcommands have the same class. The client has a parser like it, because it does not
    import the library.
    """

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
