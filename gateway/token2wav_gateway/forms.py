"""Forms of texts in requests and settings, which messages describe in words."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator, StringConstraints

from token2wav_gateway.errors import GatewayError, RequestError

# Of all words with a spelling; a search for the words takes up to 40 ms in 4,096 characters.
_MOST_CHARACTERS = 1000


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


def few(most: int) -> BeforeValidator:
    """Returns a check that a mapping has few names, before pydantic makes an error of each."""

    def check(values: Any) -> Any:
        if isinstance(values, dict) and len(values) > most:
            raise ValueError(f"{len(values)} names; at most {most} are allowed")
        return values

    return BeforeValidator(check)


def _short(spellings: dict[str, str]) -> dict[str, str]:
    if (length := sum(map(len, spellings))) > _MOST_CHARACTERS:
        raise ValueError(
            f"words of {length} characters in all; at most {_MOST_CHARACTERS} are allowed"
        )
    return spellings


def check_length(
    field: str, text: str, longest: int, error: type[GatewayError] = RequestError
) -> None:
    """Raises an error for a text of a request that is too long."""
    if len(text) > longest:
        raise error(f"{field}: {len(text)} characters; at most {longest} are allowed", param=field)


_Spelling = Annotated[str, StringConstraints(min_length=1, max_length=100)]
# Spellings of words, by the words.
Pronunciations: TypeAlias = Annotated[dict[_Spelling, _Spelling], few(100), AfterValidator(_short)]
