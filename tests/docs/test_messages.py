"""Every message that troubleshooting quotes is in the code, or is Triton's and seen by a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = ("token2wav", "client", "exporters", "server")
SCRIPTS = ("scripts/setup.sh",)
TEST_FILES = ("tests/served/test_faults_shm.py",)
VALUE = "\0"  # stands for a value that is formatted into a message


def quoted() -> list[str]:
    """Returns the code in the first column of the page's tables."""
    cells = re.findall(r"^\| *(`.*?`) *\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("message", quoted())
def test_quoted_message_exists(message: str) -> None:
    parts = [part for part in message.split("...") if part.strip()]
    assert max(map(len, parts)) >= 10, "too short to tell it from others"
    pattern = re.compile(".*".join(map(re.escape, parts)))
    assert any(pattern.search(text) for text in texts()), "no string in the code reads so"


def test_there_are_messages() -> None:
    assert len(quoted()) > 20


@cache
def texts() -> frozenset[str]:
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")] + [
        ROOT / name for name in TEST_FILES
    ]
    strings = {text for file in files for text in _strings(file)}
    strings.update(
        line for name in SCRIPTS for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
    )
    return frozenset(strings)


def _strings(file: Path) -> Iterator[str]:
    """Yields string literals other than docstrings, with VALUE in place of formatted values."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in statements
        ):
            yield node.value
