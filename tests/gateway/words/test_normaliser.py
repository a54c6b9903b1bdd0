"""Texts as they are spoken: pronunciations, and a normaliser in a process of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.plugins import installed
from token2wav.plugins import Plugins
from token2wav_gateway.settings import Settings, SettingsError, TextSettings, check_plugin
from token2wav_gateway.words import normaliser
from token2wav_gateway.words.normaliser import Normaliser, respelled
from token2wav_gateway.words.normaliser_worker import LONGEST, NORMALISERS

_T = TypeVar("_T")

# Writes sentences in capitals, but does what a word of a sentence says.
_CODE = """
import os, sys, time

def Capitals(text, language):
    if "fail" in text:
        raise ValueError(text)
    if "exit" in text:
        sys.exit(text)
    if "die" in text:
        os._exit(1)
    if "hang" in text:
        time.sleep(3600)
    if "slow" in text:
        time.sleep(0.3)
    print("print", text)
    return text.upper()
"""


@pytest.fixture(scope="module")
def capitals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextSettings]:
    site = tmp_path_factory.mktemp("site")
    with installed(site, "made_up", _CODE, "token2wav.normalisers", ["Capitals"]):
        yield TextSettings(normalise="Capitals")


@pytest.fixture(scope="module")
def wetext() -> TextSettings:
    return TextSettings(normalise="wetext")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a text take as long as a busy machine needs."""
    monkeypatch.setattr(normaliser, "WITHIN_S", PATIENCE_SECONDS)
    monkeypatch.setattr(normaliser, "_WORK_S", PATIENCE_SECONDS)


def run(settings: TextSettings, work: Callable[[Normaliser], Awaitable[_T]]) -> _T:
    """Runs work with a normaliser that is loaded, and checks that its process ends."""

    async def running() -> _T:
        normalise = Normaliser(settings, 32_768)
        await normalise.start()
        try:
            return await work(normalise)
        finally:
            await normalise.close()

    before = set(multiprocessing.active_children())
    result = asyncio.run(running())
    # `join` would return early where a thread of the pool is just reaping the process.
    until(lambda: not set(multiprocessing.active_children()) - before)
    return result


def spoken(settings: TextSettings, *texts: str, language: str = "Auto") -> list[str]:
    async def work(normalise: Normaliser) -> list[str]:
        return [await normalise(text, language) for text in texts]

    return run(settings, work)


async def again(normalise: Normaliser) -> str:
    """Returns the spoken form of a text, as soon as another process has taken the place of one."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (text := await normalise("good", "Auto")) == "good" and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return text


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


_SPOKEN = {
    "It is $12.50. Dr. Ada is 21.": "It is twelve point five dollars. doctor Ada is twenty one.",
    "1 \n\n 2  3\t!": "one \n\n two  three\t!",
    "One.  Two 2.\nThree 3. ": "One.  Two two.\nThree three. ",
    'He said "hello 5 times".': 'He said "hello five times".',
    '"5"': '"five"',
    "'5' \u201c6\u201d \u00ab7\u00bb": "'five' \u201csix\u201d \u00abseven\u00bb",
    '"No." He has 5.': '"No." He has five.',
    "No.": "No.",
    "Dr. Ada came.": "Dr. Ada came.",
    "*5* **6** _7_ `8`": "*five* **six** _seven_ `eight`",
    "~5 #6 [7] {8} (9)": "~five #six [seven] {eight} (nine)",
    "see [1] and 5 | 6": "see [one] and five | six",
    "\u21165 \u00a76 @7": "\u2116five \u00a7six @seven",
    "5\u00b2 +6 \u00b17": "five\u00b2 +six \u00b1seven",
    "8\u00d79 2=2 2<3": "eight\u00d7nine two=two two<three",
    "a\\5": "a\\five",
    "at 5%, 20 km/h; or: 5-6?": "at five percent, twenty kilometers per hour; or: five to six?",
    "5\u00a0km": "five\u00a0km",
    "Plan B\u00a0. It has 5.": "Plan B\u00a0. It has five.",
    "007": "oh oh seven",
    "12.5\u5143": "\u5341\u4e8c\u70b9\u4e94\u5143",
    '\u4ed6"5\u4e2a"\u3002 6\u4e2a\u3002': '\u4ed6"\u4e94\u4e2a"\u3002 \u516d\u4e2a\u3002',
    "1" * (LONGEST + 1): "1" * (LONGEST + 1),
    "It rains.\n\n" * 2000: "It rains.\n\n" * 2000,
    "!?": "!?",
    " ": " ",
    "": "",
}


@pytest.mark.usefixtures("patient")
def test_numbers_become_words(wetext: TextSettings) -> None:
    assert dict(zip(_SPOKEN, spoken(wetext, *_SPOKEN), strict=True)) == _SPOKEN


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("language", ["German", "nl"])
def test_texts_in_other_languages_stay(language: str, wetext: TextSettings) -> None:
    texts = ["Er zahlt 5,50 Euro.  Um 5 Uhr.\n\n*5*", "\u4e94 5\u3002 6\u3002"]
    assert spoken(wetext, *texts, language=language) == texts


@pytest.mark.usefixtures("patient")
def test_pronunciations_come_first() -> None:
    settings = TextSettings(normalise="wetext", pronunciations={"NVIDIA": "en vidia 2"})
    assert spoken(settings, "NVIDIA has 3.") == ["en vidia two has three."]


def test_a_text_that_spellings_make_too_long_is_left_alone(wetext: TextSettings) -> None:
    async def work(normalise: Normaliser) -> str:
        return await normalise("q 5 " * 1000, "Auto", {"q": "A. " * 33})

    assert run(wetext, work) == ("A. " * 33 + " 5 ") * 1000


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("word", ["fail", "exit"])
def test_a_sentence_that_fails_stays_alone(
    word: str, capitals: TextSettings, caplog: pytest.LogCaptureFixture
) -> None:
    said = spoken(capitals, f"One. I {word}.  Two.", "good")
    assert said == [f"ONE. I {word}.  TWO.", "GOOD"]
    assert "1 sentences stay: " in caplog.text
    assert word not in caplog.text


@pytest.mark.usefixtures("patient")
def test_another_process_takes_the_place_of_one_that_died(
    capitals: TextSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(normalise: Normaliser) -> list[str]:
        waiting = asyncio.gather(*[normalise(text, "Auto") for text in ("I die", "two", "three")])
        return [*await waiting, await normalise("more", "Auto")]

    assert run(capitals, work) == ["I die", "TWO", "THREE", "MORE"]
    assert caplog.text.count("its process has crashed") == 1
    assert "die" not in caplog.text


@pytest.mark.usefixtures("patient")
def test_a_client_that_leaves_does_not_end_the_process(capitals: TextSettings) -> None:
    async def work(normalise: Normaliser) -> str:
        leaving = asyncio.create_task(normalise("slow", "Auto"))
        await asyncio.sleep(0.1)
        leaving.cancel()
        await asyncio.wait({leaving})
        return await normalise("good", "Auto")

    assert run(capitals, work) == "GOOD"


def test_late_texts_of_a_burst_are_spoken_as_they_stand(
    capitals: TextSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(normalise: Normaliser) -> tuple[list[str], str]:
        texts = [normalise(f"slow {n}", "Auto") for n in range(30)]
        return await asyncio.gather(*texts), await again(normalise)

    texts, later = run(capitals, work)
    late = [text for text in texts if text.islower()]
    assert len(texts) == 30
    assert late
    assert texts[len(texts) - len(late) :] == late  # in order
    assert later == "GOOD"


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("turns", [1, 2, 3, 4, 1000])
def test_texts_are_spoken_as_they_stand_when_the_gateway_ends(
    turns: int, capitals: TextSettings
) -> None:
    """At any moment of a text. A process that hangs ends too, because `run` finds none."""
    texts = ["I hang", "two", "three"]

    async def work(normalise: Normaliser) -> list[str]:
        waiting = asyncio.gather(*(normalise(text, "Auto") for text in texts))
        for _ in range(turns):
            await asyncio.sleep(0)
        await normalise.close()
        return await waiting

    assert run(capitals, work) == texts


def test_a_normaliser_that_is_not_installed() -> None:
    with pytest.raises(SettingsError, match=r"text\.normalise: 'nothing' is not one of .*wetext"):
        check_plugin("text.normalise", "nothing", NORMALISERS)
    missing = Plugins("token2wav.normalisers", {"mine": "no_such_package:normalise"})
    with pytest.raises(
        SettingsError, match=r"mine cannot be imported: ModuleNotFoundError: .*'no_s"
    ):
        check_plugin("text.normalise", "mine", missing)
    with pytest.raises(ValueError, match="at most 100 characters"):
        Settings.model_validate({"text": {"pronunciations": {"a": "b" * 101}}})
