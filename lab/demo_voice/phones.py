"""Phones of the training sentences, as numbers that a recogniser learns to write."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

# Symbols of the phonetic alphabet for piper's English. A diphthong or an affricate is two symbols.
# Marks of stress and length, spaces and punctuation are left out.
PHONES = "aæɐɑɔəɚɛɜeiɪᵻouʊʌbdðfɡhjklmnŋpɹɾʔsʃtθvwzʒ"
_NUMBERS = {phone: number for number, phone in enumerate(PHONES, start=1)}


def phone_numbers(pronunciation: Iterable[str]) -> NDArray[np.int8]:
    """Returns the numbers of the phones in a pronunciation, from 1; other symbols are dropped."""
    return np.array([_NUMBERS[symbol] for symbol in pronunciation if symbol in _NUMBERS], np.int8)
