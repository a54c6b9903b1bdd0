"""Body of an utterance over HTTP: its JSON is checked here, because Triton reads more than it can
hold.

Triton 2.51 cuts a JSON integer down to the lower 32 bits without a word, so that token 4294967297
is spoken as token 1. It answers JSON that it cannot read with status 500, which tells a load
balancer that the server is broken.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

# An utterance is one object of a few names and flat lists. Triton 2.51 dies of deep nesting, and
# has not answered 200,000 names after a minute.
_BRACKETS = 32
_NAMES = 64
_INT32 = range(-(2**31), 2**31)
_INTEGERS = {"tokens": _INT32, "prompt_tokens": _INT32, "voice_id": range(256)}
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


def problem_of(body: bytes) -> str:
    """Returns a sentence about the first thing that is wrong with a body; empty if Triton can read
    it.
    """
    if body.count(b"[") + body.count(b"{") > _BRACKETS or body.count(b":") > _NAMES:
        return f"the body has more than {_BRACKETS} brackets or {_NAMES} colons: lists must be flat"
    try:
        utterance = json.loads(
            body.decode(),
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_constant=_refuse_constant,
        )
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are of this class
        return f"the body is no JSON: {error}"
    if not isinstance(utterance, dict):
        return "the body is no JSON object"
    for name in _SEQUENCE:
        if name in utterance:
            return f"{name}: a request over HTTP is a whole utterance; use gRPC for more than one request"
    for name, allowed in _INTEGERS.items():
        values = utterance.get(name, [])
        for value in values if isinstance(values, list) else [values]:
            if type(value) is not int or value not in allowed:
                return (
                    f"{name}: {_shown(value)} is not an integer from {allowed[0]} to {allowed[-1]}"
                )
    return ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the name {_shown(next(name for name in names if names.count(name) > 1))} is there "
            f"twice"
        )
    return values


def _integer(text: str) -> int:
    # the first digits of a longer number are beyond every bound too, and read in no time
    return int(text[:20])


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
