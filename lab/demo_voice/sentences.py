"""Text for training: sentences made from templates, so that nobody else owns them.

Templates cover the melody of statements, questions, lists and numbers. A share of the gaps is
filled with any word of the CMU pronouncing dictionary (BSD licence, in the wheel of pocketsphinx),
so that all combinations of sounds occur.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from pathlib import Path

from examples.demo_voice.text import FURTHER, HELD_OUT, UNSEEN, held_out, normal

_ANY_WORD_SHARE = 0.4  # share of the gaps for nouns and adjectives that any word fills

_WORDS = {
    "name": "Anna Robert Maria Thomas Julia Peter Helen George Susan Walter Linda "
    "Frank Olivia Henry Grace Arthur Nina "
    "Samuel Clara Victor Emma Hugo Rachel Martin Joyce Felix Laura Oscar Diana Philip Amy "
    "Jonathan Beth Charles Zoe",
    "place": "Boston Madrid London Chicago Vienna Dublin Toronto Denver Paris Oslo "
    "Sydney Austin Lisbon Geneva "
    "Portland Cairo Houston Athens Seattle Budapest Montreal Naples Glasgow Phoenix Warsaw Zurich "
    "Johannesburg Kyoto",
    "noun": "river engine garden letter window doctor village kitchen bridge "
    "thunder camera pencil mountain shadow "
    "teacher basket island bottle station forest mirror hammer blanket orchard butcher voyage "
    "measure jewel youth "
    "cathedral lantern squirrel treasure judge church chair ship shirt thing path feather leather "
    "zebra vision "
    "garage beach yard wolf wheel queen square spring screw street throat stool box axe fox lake "
    "oil "
    "toy boy noise cow house owl couch fire hour flower chapter picture question answer football "
    "cheese apple",
    "adjective": "quiet yellow heavy ancient gentle bitter frozen clever narrow purple "
    "hollow broken curious shallow "
    "enormous sharp careful smooth strange pleasant rough thick thin usual jealous young wide "
    "warm wooden honest "
    "vague fresh cheap loud round sour joyful royal moist fair rare pure obscure brief vivid "
    "awkward eager",
    "verb": "follow carry measure open paint answer borrow forget discover repair "
    "finish notice gather believe "
    "describe enjoy avoid choose push pull watch wash throw breathe judge change reach teach join "
    "destroy allow "
    "announce deserve require include measure visit prove solve weigh sew chew examine exaggerate",
    "past": "followed carried measured opened painted answered borrowed forgot "
    "discovered repaired finished noticed "
    "gathered believed described enjoyed avoided chose pushed pulled watched washed threw judged "
    "changed reached "
    "taught joined destroyed allowed announced deserved required visited proved solved weighed "
    "sewed lost found",
    "adverb": "slowly quickly carefully badly hardly always never often rarely "
    "suddenly quietly roughly gladly "
    "usually honestly perhaps clearly somehow together outside tomorrow yesterday again",
    "time": "this morning|last night|on Monday|on Wednesday afternoon|in January|"
    "before breakfast|after the storm|"
    "at midnight|during the summer|every Thursday|next year|in the autumn|at half past seven|by "
    "Friday|"
    "for several hours|since February|until the end of August|on the first of October|in the "
    "meantime",
    "where": "near the harbor|under the old bridge|behind the church|across the "
    "street|in the valley|on the roof|"
    "beside the fireplace|between two houses|at the corner|above the clouds|outside the "
    "theater|by the window|"
    "through the narrow gate|around the world|along the northern shore|within the boundary|beyond "
    "the fence",
}

_TEMPLATES = """
The {adjective} {noun} {past} the {noun} {where}.
{name} {past} a {adjective} {noun} {time}.
Did {name} {verb} the {noun} {time}?
Why would anyone {verb} a {adjective} {noun}?
{number} {noun}s were sold in {place} {time}.
Please {verb} the {noun} {adverb}, and {verb} the {noun} {where}.
The train to {place} leaves at {clock}.
My number is {digits}.
"I will {verb} it," said {name}, "but only {time}."
We need {number} more {noun}s, {number} {noun}s, and one {adjective} {noun}.
Where did you put the {noun}, {name}?
It was {adjective}, {adjective}, and rather {adjective}.
In {year}, a {adjective} {noun} was found {where}.
How many {noun}s can {name} {verb} {time}?
{name} and {name} {adverb} {past} their {noun}.
No, the {noun} is {adjective}; the {noun} is not.
{time}, the {noun} in {place} {past} us all.
That costs {number} dollars and {small} cents.
Could you {verb} this {noun} for me?
If the {noun} is {adjective}, {verb} it {adverb}.
There's a {noun} {where}, isn't there?
{any}, {any}, {any}, and {any}.
{any} {any} {any}.
The {any} of {any} {past} every {any}.
{name} {any} met {name} {any} in {place}.
What does {any} mean, and who uses {any}?
Turn {side} after {number} miles, then {verb} the {noun}.
They have {past} it {small} times {time}, haven't they?
Nobody {past} the {adjective} {any} {where}.
Oh, what a {adjective} {noun}!
{small} plus {small} is {number}.
You should {verb} it, they could {verb} it, and she would {adverb} {verb} it.
Thank you, {name}.
A {noun} without a {noun} is like a {noun} {where}.
When {name} came home {time}, the {noun} was {adjective}.
Is it the {adjective} one or the {adjective} one?
""".strip().splitlines()


class Sentences(ABC):
    """Source of any number of different sentences, which never returns a held-out sentence."""

    def __init__(self) -> None:
        self._seen = {
            normal(sentence) for path in (HELD_OUT, UNSEEN, FURTHER) for sentence in held_out(path)
        }

    def take(self, count: int) -> list[str]:
        """Returns the next `count` sentences. No sentence is returned twice."""
        taken: list[str] = []
        while len(taken) < count:
            sentence = self._make()
            if normal(sentence) not in self._seen:
                self._seen.add(normal(sentence))
                taken.append(sentence)
        return taken

    @abstractmethod
    def _make(self) -> str:
        """Returns a random sentence."""


class Templates(Sentences):
    """Source of sentences from all templates; the same for the same seed.

    Args:
        dictionary: file of the CMU pronouncing dictionary.
    """

    def __init__(self, dictionary: Path, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._any = dictionary_words(dictionary, r"[a-z]{4,11}")
        self._lists = {
            kind: words.split("|") if "|" in words else words.split()
            for kind, words in _WORDS.items()
        }

    def _make(self) -> str:
        template = self._random.choice(_TEMPLATES)
        sentence = re.sub(r"\{(\w+)\}", lambda match: self._fill(match[1]), template)
        return sentence[0].upper() + sentence[1:]

    def _fill(self, kind: str) -> str:
        rng = self._random
        if kind == "any" or (kind in ("noun", "adjective") and rng.random() < _ANY_WORD_SHARE):
            return rng.choice(self._any)
        if kind in self._lists:
            return rng.choice(self._lists[kind])
        return {
            "number": lambda: str(rng.choice((rng.randrange(2, 100), rng.randrange(100, 10_000)))),
            "small": lambda: str(rng.randrange(2, 30)),
            "digits": lambda: " ".join(rng.choices("0123456789", k=rng.randrange(4, 8))),
            "year": lambda: str(rng.randrange(1700, 2030)),
            "clock": lambda: f"{rng.randrange(1, 13)}:{rng.randrange(10, 60)}",
            "side": lambda: rng.choice(("left", "right")),
        }[kind]()


def dictionary_words(path: Path, pattern: str) -> list[str]:
    """Returns all words of a file of the CMU pronouncing dictionary that match a pattern."""
    words = (line.split(maxsplit=1)[0] for line in path.read_text(encoding="utf-8").splitlines())
    return [word for word in words if re.fullmatch(pattern, word)]
