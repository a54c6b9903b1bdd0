"""Tables of test cases in the form of text."""

from __future__ import annotations


def table(text: str) -> list[tuple[str, ...]]:
    """Reads a table of test cases: a line for each case, with bars between the cells.

    A cell may contain `\\n` for the end of a line, and quotes around it keep its outer spaces.
    """
    rows = [line.split(" | ") for line in text.strip().splitlines()]
    return [tuple(_cell(cell.strip()) for cell in row) for row in rows]


def _cell(text: str) -> str:
    text = text.replace("\\n", "\n")
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text
