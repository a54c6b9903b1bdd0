"""Code in the pages: Python compiles, and the script that runs the pages finds every block that is
marked as runnable.
"""

from __future__ import annotations

import ast
from pathlib import Path

from scripts.run_docs import blocks
from tests.docs.markdown import code_blocks


def test_python_compiles(page: Path) -> None:
    for block in code_blocks(page):
        if block.language == "python":
            # Pages also show the body of a coroutine.
            compile(block.text, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_block_of_commands_is_marked_as_runnable_or_not(page: Path) -> None:
    for block in blocks(page):
        assert block.text.strip()
