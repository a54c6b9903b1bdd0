"""Code in the pages: Python compiles, and the script that runs the pages finds every block that is
marked as runnable.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.run_docs import Block, MarkError, blocks
from tests.docs.markdown import code_blocks


def test_python_compiles(page: Path) -> None:
    for block in code_blocks(page):
        if block.language == "python":
            # Pages also show the body of a coroutine.
            compile(block.text, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_block_of_commands_is_marked_as_runnable_or_not(page: Path) -> None:
    for block in blocks(page):
        assert block.text.strip()


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n<!-- runnable: server -->\n\n    first \\\n        continued\n\n    second\n\n"
        "Text.\n\n<!-- not runnable: needs docker -->\n\n    left out\n\n- item\n    of a list\n\n"
        "<!-- runnable -->\n\n```python\nif x:\n    y()\n```\n\n```yaml\na: "
        "1\n```\n\n```python\nnot marked\n```\n"
    )
    assert blocks(page) == [
        Block(page, 5, "", "first \\\n    continued\n\nsecond", "server"),
        Block(page, 21, "python", "if x:\n    y()", None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- runnable: sever -->\n\n    make demo\n", "is not a mark"),
        ("<!-- runnable -->\n\nText.\n", "no block"),
        ("<!-- runnable -->\n\n```yaml\na: 1\n```\n", "no block"),
        ("<!-- runnable -->", "no block"),
        ("<!-- runnable -->\nText.\n\n    make demo\n", "no block|no mark"),
        ("<!-- not runnable -->\n\n    make demo\n", "is not a mark"),
        ("<!-- not runnable: -->\n\n    make demo\n", "is not a mark"),
        ("    make demo\n", "have no mark"),
        ("```bash\nmake demo\n```\n", "have no mark"),
    ],
)
def test_marks_that_are_wrong_are_refused(tmp_path: Path, text: str, message: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(MarkError, match=rf"page\.md:\d: .*({message})"):
        blocks(page)
