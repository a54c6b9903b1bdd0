"""Check of the JSON body of an inference request over HTTP, before Triton reads it.

The paths `generate_stream` and `infer` have different bodies. A body of `generate_stream` has the
name of each tensor with a flat list of its values. A body of `infer` has a list `inputs`. Each of
its tensors has a name, a shape, a type and values.

Triton 2.51 silently truncates a JSON integer to its lower 32 bits, so that token 4294967297 becomes
token 1. It answers JSON that it cannot parse with status 500, which a load balancer interprets as a
broken server.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

# An utterance is one JSON object with a few names and flat lists. Triton 2.51 crashes on deep
# nesting, and does not answer an object with 200,000 names within a minute.
_BRACKETS = 32
_NAMES = 64
_INT32 = range(-(2**31), 2**31)
_INTEGERS = {"tokens": _INT32, "prompt_tokens": _INT32, "voice_id": range(256)}
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


def problem_of(body: bytes) -> str:
    """Returns a sentence about the first error in a body; an empty string if Triton can read it."""
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
        return f"the body is not valid JSON: {error}"
    if not isinstance(utterance, dict):
        return "the body is not a JSON object"
    for name in _SEQUENCE:
        if name in utterance:
            return (
                f"{name}: not allowed over HTTP, where a request is a whole utterance; use "
                "gRPC to send an utterance in several requests"
            )
    for name, allowed in _INTEGERS.items():
        values = utterance.get(name, [])
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, list):
                return f"{name}: {_shown(value)} is a list; expected one flat list of integers"
            if type(value) is not int or value not in allowed:
                return (
                    f"{name}: {_shown(value)} is not an integer from {allowed[0]} to {allowed[-1]}"
                )
    # `generate_stream` has parameters beside the tensors, and `infer` in an object of their own.
    for parameters in (utterance, utterance.get("parameters")):
        delays = parameters.get("delays") if isinstance(parameters, dict) else None
        if isinstance(delays, list):
            return f"delays: {_shown(delays)} is not a text of integers such as '0,1,2'"
    tensors = utterance.get("inputs", [])
    if not isinstance(tensors, list):
        return "inputs: not a list"
    return next(filter(None, map(_tensor_problem, tensors)), "")


def _tensor_problem(tensor: Any) -> str:
    """Returns a sentence about an error in a tensor of `inputs`; an empty string without errors."""
    if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
        return "inputs: each input must be an object with a name"
    field, shape = _shown(tensor["name"]).strip('"'), tensor.get("shape")
    if not isinstance(shape, list) or any(
        type(size) is not int or size not in _INT32 or size < 0 for size in shape
    ):
        return f"{field}: the shape {_shown(shape)} is not a list of sizes"
    data = tensor.get("data")
    values = _flat(data)
    if len(values) != math.prod(shape):
        return f"{field}: the shape {_shown(shape)} does not fit {len(values)} values"
    nested = isinstance(data, list) and any(type(row) is list for row in data)
    if nested and not _has_shape(data, shape):
        return f"{field}: rows of different lengths, or of another shape than {_shown(shape)}"
    if tensor.get("datatype") == "INT32":
        for value in values:
            if type(value) is not int or value not in _INT32:
                return (
                    f"{field}: {_shown(value)} is not an integer from {_INT32[0]} to {_INT32[-1]}"
                )
    return ""


def _flat(values: Any) -> list[Any]:
    """Returns the values of nested lists. The number of lists is limited by the brackets."""
    if not isinstance(values, list):
        return [values]
    return [value for part in values for value in (_flat(part) if type(part) is list else [part])]


def _has_shape(values: Any, shape: list[int]) -> bool:
    if not shape:
        return type(values) is not list
    return (
        type(values) is list
        and len(values) == shape[0]
        and all(_has_shape(part, shape[1:]) for part in values)
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the name {_shown(next(name for name in names if names.count(name) > 1))} "
            "appears more than once"
        )
    return values


def _integer(text: str) -> int:
    # 20 characters are enough to exceed every limit. Converting a very long number would take long.
    return int(text[:20])


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
