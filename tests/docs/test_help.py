"""Help texts of commands and the pages about them agree: exit codes and subcommands."""

from __future__ import annotations

import re

import pytest

from tests.docs.markdown import ROOT
from token2wav.commands import COMMANDS, main

PAGES = {
    "synth": ROOT / "docs/client.md",
    "export": ROOT / "docs/export.md",
    "serve": ROOT / "docs/reliability.md",
    "voice": ROOT / "docs/voices.md",
}


@pytest.fixture(params=PAGES)
def program(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def helped(program: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([program, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_exit_codes(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    codes = re.findall(
        r"^  (\d+) +\S", helped(program, capsys).partition("exit codes:")[2], re.MULTILINE
    )
    page = PAGES[program].read_text(encoding="utf-8")
    table = re.search(
        r"^\| (?:exit )?code \|.*\n\|[-|]+\n(?P<rows>(?:\|.*\n)+)", page, re.MULTILINE
    )
    assert table, "the page has a table of exit codes"
    cells = [row.split("|")[1] for row in table["rows"].splitlines()]
    assert codes
    assert [code for cell in cells for code in re.findall(r"\d+", cell)] == codes


def test_subcommands(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGES[program].read_text(encoding="utf-8")
    for command in re.findall(
        r"^    ([a-z][a-z0-9-]*) {2,}\S|^    ([a-z][a-z0-9-]*)$",
        helped(program, capsys),
        re.MULTILINE,
    ):
        name = "".join(command)
        assert re.search(rf"token2wav {program} {name}\b|`{name}`", page), (
            f"{PAGES[program].name} does not name {name}"
        )


def test_every_subcommand_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert {name for name in COMMANDS if f"token2wav {name}" not in pages} == set()
