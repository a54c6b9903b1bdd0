"""Talk: sentences that a trigram model of English draws word by word.

The model is in the wheel of pocketsphinx (BSD licence). The sentences have no meaning. But they
contain many small words, which real speech runs together, and any word may occur. Templates have
neither. A tokenizer that was trained with templates alone makes a quarter more errors on real
sentences.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from pocketsphinx import Config, LogMath, NGramModel

from lab.demo_voice.sentences import Sentences, dictionary_words

# Candidates for each word. They are drawn by their frequency, and weighted by the two words before.
_CANDIDATES = 600
_SHORTEST, _LONGEST = 4, 18  # words
_UNKNOWN = -100.0  # natural logarithm of a probability; words that the model lacks are far below
_ASKS = re.compile("who|what|where|when|why|how|do|does|did|is|are|can|could|would|will")


class Talk(Sentences):
    """Source of sentences that a language model draws; the same for the same seed.

    Args:
        language_model: trigram model that pocketsphinx reads.
        dictionary: file of the CMU pronouncing dictionary, with all words that may occur.
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
        words: list[str] = []
        while (word := self._next(words)) is not None:
            # A sentence longer than one breath is dropped, and another one begins.
            words = [*words, word] if len(words) < _LONGEST else []
        sentence = " ".join(
            "I" + word[1:] if word == "i" or word.startswith("i'") else word for word in words
        )
        return sentence[0].upper() + sentence[1:] + ("?" if _ASKS.fullmatch(words[0]) else ".")

    def _next(self, words: list[str]) -> str | None:
        """Draws the next word; None ends the sentence."""
        before = ["<s>", *words][:-3:-1]  # the last two words, the newest first
        candidates = self._random.choice(len(self._words), _CANDIDATES, p=self._share)
        logs = np.array([self._log(self._words[index], before) for index in candidates])
        weights = np.append(np.exp(logs - self._common[candidates]) / _CANDIDATES, 0.0)
        if len(words) >= _SHORTEST:
            weights[-1] = np.exp(self._log("</s>", before))
        chosen = self._random.choice(_CANDIDATES + 1, p=weights / weights.sum())
        return None if chosen == _CANDIDATES else str(self._words[candidates[chosen]])

    def _log(self, word: str, before: list[str]) -> float:
        """Returns the natural logarithm of the probability of a word.

        Args:
            before: words before it, the newest first.
        """
        return float(self._logs.log_to_ln(self._model.prob([word, *before])))
