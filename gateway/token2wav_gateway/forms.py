"""Forms of texts in requests and settings, which messages describe in words."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field, StringConstraints

_Spelling = Annotated[str, StringConstraints(min_length=1, max_length=100)]
# Spellings by words.
Pronunciations: TypeAlias = Annotated[dict[_Spelling, _Spelling], Field(max_length=100)]


def matching(pattern: str, expected: str) -> AfterValidator:
    """Returns a check that a whole text has a form.

    Args:
        expected: description for the message. The text itself may be a secret, and is left out.
    """
    form = re.compile(pattern)

    def check(text: str) -> str:
        if not form.fullmatch(text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)
