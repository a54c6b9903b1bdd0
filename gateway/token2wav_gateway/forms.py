"""Forms of texts in requests and settings, which messages describe in words."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator, StringConstraints

from token2wav_gateway.errors import GatewayError, RequestError


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


def check_length(
    field: str, text: str, longest: int, error: type[GatewayError] = RequestError
) -> None:
    """Raises an error for a text of a request that is too long."""
    if len(text) > longest:
        raise error(f"{field}: {len(text)} characters; at most {longest} are allowed", param=field)


_Spelling = Annotated[str, StringConstraints(min_length=1, max_length=100)]
# Spellings of words, by the words.
Pronunciations: TypeAlias = Annotated[dict[_Spelling, _Spelling], few(100)]
