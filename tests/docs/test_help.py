"""Help texts of commands and the pages about them agree: exit codes and subcommands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from token2wav_client.cli import main as client
from token2wav_export.cli import main as export
from token2wav_server.cli import main as serve
from token2wav_voice.cli import main as voice

PAGES: dict[str, tuple[Callable[[list[str]], int], Path]] = {
    "token2wav-client": (client, ROOT / "docs/client.md"),
    "token2wav-export": (export, ROOT / "docs/export.md"),
    "token2wav-serve": (serve, ROOT / "docs/reliability.md"),
    "token2wav-voice": (voice, ROOT / "docs/voices.md"),
}


@pytest.fixture(params=PAGES)
def program(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def helped(program: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        PAGES[program][0](["--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_exit_codes(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    codes = re.findall(
        r"^  (\d+) +\S", helped(program, capsys).partition("exit codes:")[2], re.MULTILINE
    )
    page = PAGES[program][1].read_text(encoding="utf-8")
    table = re.search(
        r"^\| (?:exit )?code \|.*\n\|[-|]+\n(?P<rows>(?:\|.*\n)+)", page, re.MULTILINE
    )
    assert table, "the page has a table of exit codes"
    cells = [row.split("|")[1] for row in table["rows"].splitlines()]
    assert codes
    assert [code for cell in cells for code in re.findall(r"\d+", cell)] == codes


def test_subcommands(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGES[program][1].read_text(encoding="utf-8")
    for command in re.findall(
        r"^    ([a-z][a-z0-9-]*) {2,}\S|^    ([a-z][a-z0-9-]*)$",
        helped(program, capsys),
        re.MULTILINE,
    ):
        name = "".join(command)
        assert re.search(rf"{program} {name}\b|`{name}`", page), (
            f"{PAGES[program][1].name} does not name {name}"
        )
