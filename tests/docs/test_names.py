"""Make targets, options of commands and settings that the pages name exist."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from tests.docs.markdown import ROOT, code_blocks, commands, spans
from token2wav.commands import COMMANDS
from token2wav.config import ServerConfig
from token2wav.config.values import from_mapping
from token2wav_gateway.doors.requests import SessionConfig, SpeechRequest

# Folders of programs that are run as modules.
MODULES = ("benchmarks", "examples", "lab")
# Of Triton, pip, Docker, Kubernetes, perf_analyzer and others, where a page names them on their
# own.
FOREIGN = {
    "--backend-directory",
    "--exit-timeout-secs",
    "--model-name",
    "--request-count",
    "--request-rate-range",
    "--shm-size",
    "--warmup-request-count",
}

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_MAKE = re.compile(r"(?:^|\s)make (?P<target>[a-z][a-z-]*)(?P<rest>(?: [A-Z_]+=\S*)*)")
_PROGRAM = re.compile(
    r"(?:^|[\s/(])token2wav (?P<name>[a-z][a-z-]*)(?=\s|$)"
    r"|-m (?P<module>benchmarks|examples|lab)\."
)
_SETTING = re.compile(r"(?P<part>stream|runtime|limits)\.(?P<key>[a-z_]+)")


def test_make_targets_and_variables(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands(page):
        for match in _MAKE.finditer(command):
            assert re.search(rf"^{match['target']}:", makefile, re.MULTILINE), (
                f"make {match['target']}: no such target"
            )
            for variable in re.findall(r"([A-Z_]+)=", match["rest"]):
                assert f"$({variable}" in makefile, (
                    f"make {match['target']} {variable}=: no such variable"
                )


def test_options_of_commands(page: Path) -> None:
    ours = frozenset(_OPTION.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    ours = ours.union(*map(_options, (*COMMANDS, *MODULES)))
    for command in commands(page):
        for part in re.split(r"\s[|;]\s|&&", command):
            if program := _PROGRAM.search(part):
                name = program["name"] or program["module"]
                arguments = part[program.start() :].partition(" -- ")[0]
                unknown = set(_OPTION.findall(arguments)) - _options(name)
                assert not unknown, f"{part.strip()}: {name} has no {', '.join(unknown)}"
            elif part.lstrip().startswith("--"):
                unknown = set(_OPTION.findall(part)) - ours - FOREIGN
                assert not unknown, f"{part}: nothing here has {', '.join(unknown)}"


def test_settings(page: Path) -> None:
    for span in spans(page):
        if setting := _SETTING.match(span):
            part = getattr(ServerConfig(), setting["part"])
            assert hasattr(part, setting["key"]), f"{span}: no such setting"
    for block in code_blocks(page):
        if block.language == "yaml" and re.search(
            r"^(stream|runtime|limits):$", block.text, re.MULTILINE
        ):
            from_mapping(ServerConfig, yaml.safe_load(block.text), "")


def test_the_settings_page_shows_the_defaults() -> None:
    block = next(
        block for block in code_blocks(ROOT / "docs/settings.md") if block.language == "yaml"
    )
    assert from_mapping(ServerConfig, yaml.safe_load(block.text), "") == ServerConfig()
    shown = {
        (part, key) for part, keys in yaml.safe_load(block.text).items() for key in keys or [""]
    }
    defaults = dataclasses.asdict(ServerConfig())
    assert shown == {(part, key) for part, keys in defaults.items() for key in keys or [""]}


def test_the_page_of_the_gateway_has_every_field_of_a_speech() -> None:
    fields = {*SpeechRequest.model_fields, *SessionConfig.model_fields, *SessionConfig.ignored}
    pages = [ROOT / "docs" / name for name in ("gateway.md", "gateway_websocket.md")]
    assert fields - {"type", "input"} <= {span for page in pages for span in spans(page)}


@cache
def _options(program: str) -> frozenset[str]:
    """Returns the options of a subcommand, or the strings in a folder that look like options."""
    if program in COMMANDS:
        command = COMMANDS[program]
        return frozenset(_options_of(command.load(command.parser)()))
    texts = (file.read_text(encoding="utf-8") for file in (ROOT / program).rglob("*.py"))
    return frozenset(
        option for text in texts for option in re.findall(r'"(--[a-z][a-z0-9-]*)"', text)
    )


def _options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _options_of(subparser)
