"""The file of one section: what was measured, where and how. Written after every row, so that a crash costs one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

UNFINISHED = "it was interrupted; what it had measured by then is here"


class Record:
    """One section's results; until `finish` they count as interrupted.

    Args:
        path: of its JSON.
        facts: of host and run, which come first in it.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path = path
        self._interrupted = False
        self._content: dict[str, Any] = {**facts, "problem": UNFINISHED}
        self._write()

    def put(self, name: str, value: Any) -> None:
        """Sets an entry."""
        self._content[name] = value
        self._write()

    def facts(self, values: dict[str, Any]) -> None:
        """Sets several entries."""
        self._content |= values
        self._write()

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Puts a row at the end of a list."""
        self._content.setdefault(name, []).append(row)
        self._write()

    def interrupt(self, *_: object) -> NoReturn:
        """Handles a signal to end. Whoever loses the exception, a library in an import for one, meets it again here."""
        self._interrupted = True
        raise KeyboardInterrupt

    def finish(self, problem: str | None = None) -> None:
        """Notes that the section came to its end, or why it did not."""
        self.put("problem", problem)

    def _write(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        write_json(self._path, self._content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file that is whole whenever somebody looks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def read_records(folder: Path, sections: list[str]) -> dict[str, dict[str, Any]]:
    """What there is of sections, by name."""
    paths = {name: folder / f"{name}.json" for name in sections}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}
