"""Talk in sentences that a trigram model of English draws word by word (BSD licence, in
pocketsphinx's wheel).

They mean nothing, but they are full of the small words that real sentences run together, and any
word may come: what templates lack. A tokenizer that learned from templates alone errs by a quarter
more on real sentences.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from pocketsphinx import Config, LogMath, NGramModel

from examples.demo_voice.text import Sentences, dictionary_words

# for every word: so many are drawn by how common they are, then weighed by the words before them
_CANDIDATES = 600
_SHORTEST, _LONGEST = 4, 18  # words
_UNKNOWN = -100.0  # natural logarithm; words that the model lacks are far below
_ASKS = re.compile("who|what|where|when|why|how|do|does|did|is|are|can|could|would|will")


class Talk(Sentences):
    """Source of sentences that a language model draws, the same for the same seed.

    Args:
        language_model: trigram model that pocketsphinx reads.
        dictionary: file of the CMU pronouncing dictionary: the words that may come.
        seed: seed of the choices.
    """

    def __init__(self, language_model: Path, dictionary: Path, seed: int) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)
        self._logs = LogMath()
        self._model = NGramModel(Config(), self._logs, str(language_model))
        words = dictionary_words(dictionary, r"[a-z']+")
        common = np.array([self._log(word, []) for word in words])
        known = common > _UNKNOWN
        self._words = np.array(words)[known]
        self._common = common[known]
        self._share = np.exp(self._common) / np.exp(self._common).sum()

    def _make(self) -> str:
        said: list[str] = []
        while (word := self._next(said)) is not None:
            # longer than one breath: another one
            said = [*said, word] if len(said) < _LONGEST else []
        sentence = " ".join(
            "I" + word[1:] if word == "i" or word.startswith("i'") else word for word in said
        )
        return sentence[0].upper() + sentence[1:] + ("?" if _ASKS.fullmatch(said[0]) else ".")

    def _next(self, said: list[str]) -> str | None:
        """Draws a word to follow; None where the sentence ends."""
        before = ["<s>", *said][:-3:-1]  # two words, the newest first
        drawn = self._random.choice(len(self._words), _CANDIDATES, p=self._share)
        logs = np.array([self._log(self._words[index], before) for index in drawn])
        weights = np.append(np.exp(logs - self._common[drawn]) / _CANDIDATES, 0.0)
        if len(said) >= _SHORTEST:
            weights[-1] = np.exp(self._log("</s>", before))
        chosen = self._random.choice(_CANDIDATES + 1, p=weights / weights.sum())
        return None if chosen == _CANDIDATES else str(self._words[drawn[chosen]])

    def _log(self, word: str, before: list[str]) -> float:
        """Returns the natural logarithm of a word's probability after others, the newest first."""
        return float(self._logs.log_to_ln(self._model.prob([word, *before])))
