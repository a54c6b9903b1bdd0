"""Texts as they are spoken: pronunciations, and a normaliser in a process of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.plugins import installed
from token2wav_gateway.settings import Settings, SettingsError, TextSettings, check_plugin
from token2wav_gateway.words import normaliser
from token2wav_gateway.words.normaliser import LONGEST, NORMALISERS, Normaliser, respelled

# Each does what its name says for a text with "bad", and writes other texts in capitals.
_CODE = """
import os, time

def Hangs(text, language):
    if "bad" in text:
        time.sleep(3600)
    return text.upper()

def Dies(text, language):
    if "bad" in text:
        os._exit(1)
    return text.upper()

def Fails(text, language):
    if "bad" in text:
        raise ValueError(text)
    return text.upper()

loaded = []

def SlowToLoad(text, language):
    if not loaded:
        time.sleep(3)
    loaded.append(text)
    return text.upper()

def Prints(text, language):
    print("1 OK 4")
    os.write(2, b"bad")
    return text.upper()
"""


@pytest.fixture(scope="module")
def made_up_normalisers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    site = tmp_path_factory.mktemp("site")
    names = ("Hangs", "Dies", "Fails", "Prints", "SlowToLoad")
    with installed(site, "made_up_normalisers", _CODE, "token2wav.normalisers", names):
        yield site


def spoken(settings: TextSettings, texts: Sequence[str], language: str = "Auto") -> list[str]:
    async def work() -> list[str]:
        normalise = Normaliser(settings)
        try:
            return [await normalise(text, language) for text in texts]
        finally:
            await normalise.close()

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("spellings", "text", "said"),
    [
        ({}, "SQL", "SQL"),
        ({"SQL": "sequel"}, "SQL, NoSQL and SQL2; (SQL).", "sequel, NoSQL and SQL2; (sequel)."),
        ({"SQL": "sequel"}, "sql", "sql"),
        ({"New York": "Gotham", "New": "Old"}, "New York, New!", "Gotham, Old!"),
        ({"a": "b", "b": "a"}, "a b", "b a"),
        ({"C++": "see plus plus"}, "C++ is C", "see plus plus is C"),
        (
            {"\u91cd\u5e86": "chongqing"},
            "\u6211\u5728\u91cd\u5e86\u3002",
            "\u6211\u5728chongqing\u3002",
        ),
        ({".*": "x"}, "a.*b .*", "a.*b x"),
    ],
)
def test_pronunciations_replace_whole_words(
    spellings: dict[str, str], text: str, said: str
) -> None:
    assert respelled(text, spellings) == said


@pytest.mark.parametrize(
    ("language", "text", "said"),
    [
        (
            "Auto",
            "It is $12.50. Dr. Ada is 21.",
            "It is twelve point five dollars. doctor Ada is twenty one.",
        ),
        ("English", "1 \n\n 2  3", "one two three"),
        ("Chinese", "12.5\u5143", "\u5341\u4e8c\u70b9\u4e94\u5143"),
        ("German", "12 Uhr", "12 Uhr"),
        ("English", "1" * (LONGEST + 1), "1" * (LONGEST + 1)),
        ("English", "!?", "!?"),
        ("English", " ", " "),
    ],
)
def test_numbers_become_words(
    language: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normaliser, "_WITHIN_S", 60)
    assert spoken(TextSettings(normalise="wetext"), [text], language) == [said]


def test_pronunciations_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normaliser, "_WITHIN_S", 60)
    settings = TextSettings(normalise="wetext", pronunciations={"NVIDIA": "en vidia 2"})
    assert spoken(settings, ["NVIDIA has 3."]) == ["en vidia two has three."]


@pytest.mark.usefixtures("made_up_normalisers")
@pytest.mark.parametrize("name", ["Hangs", "Dies", "Fails"])
def test_a_text_that_fails_is_spoken_as_it_stands(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(normaliser, "_WITHIN_S", 10 if name == "Hangs" else 60)
    with caplog.at_level(logging.WARNING):
        assert spoken(TextSettings(normalise=name), ["bad text", "good"]) == ["bad text", "GOOD"]
    assert "normaliser" in caplog.text
    assert "bad" not in caplog.text


@pytest.mark.usefixtures("made_up_normalisers")
def test_a_process_that_loads_for_longer_than_a_text_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(normaliser, "_WITHIN_S", 1)

    async def work() -> None:
        normalise = Normaliser(TextSettings(normalise="SlowToLoad"))
        assert await normalise("a", "Auto") == "a"
        with anyio.fail_after(PATIENCE_SECONDS):
            while await normalise("a", "Auto") != "A":
                pass
        await normalise.close()

    asyncio.run(work())


@pytest.mark.usefixtures("made_up_normalisers")
def test_output_of_a_normaliser_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normaliser, "_WITHIN_S", 60)
    assert spoken(TextSettings(normalise="Prints"), ["a", "b"]) == ["A", "B"]


def test_a_normaliser_that_is_not_installed() -> None:
    with pytest.raises(SettingsError, match=r"text\.normalise: 'nothing' is not one of .*wetext"):
        check_plugin("text.normalise", "nothing", NORMALISERS)
    with pytest.raises(ValueError, match="at most 100 characters"):
        Settings.model_validate({"text": {"pronunciations": {"a": "b" * 101}}})
