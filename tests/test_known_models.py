"""Names of models: the rows of `models.csv`, and the command that lists them."""

from __future__ import annotations

import json
import pkgutil
import re
from collections import Counter
from dataclasses import asdict
from importlib import import_module

import pytest

import token2wav.families
from scripts.family_table import configs
from tests.test_commands import run_without
from token2wav.commands import main
from token2wav.known_models import KnownModel, known_models
from token2wav.published.registry import family_name

UNPUBLISHED = {"streamflow"}  # of its family no weights have been published
ALL = {model.alias: model for model in known_models()}


def test_a_name_is_listed_once() -> None:
    repos = Counter(model.repo for model in known_models())
    assert len(ALL) == len(known_models())
    assert set(repos.values()) == {1}


@pytest.mark.parametrize("model", ALL.values(), ids=ALL)
def test_cells_are_of_their_kinds(model: KnownModel) -> None:
    assert re.fullmatch(r"[a-z0-9.-]+", model.alias)
    assert re.fullmatch(r"[\w-]+/[\w.-]+", model.repo)
    assert f"{float(model.rate):.4g}" == model.rate
    assert re.fullmatch(r"\d*", model.megabytes)
    assert not any("|" in cell or cell != cell.strip() for cell in asdict(model).values())
    # The note of `token2wav models` and docs/models.md say so of every model.
    assert model.verified == "public code"


def test_every_family_that_is_published_has_a_name() -> None:
    readers = {
        module.name
        for module in pkgutil.iter_modules(token2wav.families.__path__)
        if module.ispkg and hasattr(import_module(f"token2wav.families.{module.name}"), "read")
    }
    assert {model.family for model in known_models()} == readers - UNPUBLISHED


def test_rates_are_those_of_the_published_sizes() -> None:
    rates = {(family_name(config), f"{config.token_frame_rate:.4g}") for _, config in configs()}
    listed = {(model.family, model.rate) for model in known_models()}
    assert {rate for rate in rates if rate[0] not in UNPUBLISHED} <= listed


def test_the_command_lists_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["name", "repository"]
    assert [line.split()[:2] for line in lines[: len(ALL)]] == [
        [model.alias, model.repo] for model in known_models()
    ]


def test_json_has_numbers_and_nulls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = {row["alias"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == ALL.keys()
    assert rows["mimi"] == {
        **asdict(ALL["mimi"]),
        "rate": 12.5,
        "megabytes": 385,
    }
    assert rows["dac-16khz"]["megabytes"] is rows["dac-16khz"]["licence"] is None


@pytest.mark.parametrize("module", ["torch", "yaml", "huggingface_hub"])
def test_the_command_needs_no_extra(module: str) -> None:
    done = run_without(module, ["models"])
    assert (done.returncode, done.stderr) == (0, "")
