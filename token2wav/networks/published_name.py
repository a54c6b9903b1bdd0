"""Published name of a weight that does not fit or is missing, for messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

_WEIGHT_NORM = re.compile(r"\.(?:weight_[gv]|parametrizations\.weight\.original[01])$")
_NUMBER = re.compile(r"\b\d{1,4}\b")


def published_name(name: str, published: Iterable[str], current_name: Callable[[str], str]) -> str:
    """Returns the published name of a weight. That of a missing weight follows from another weight
    of its layer, or from the same weight of another layer. If the file has none of both, the name
    in the network is returned.

    Args:
        published: names of the weights in the file.
        current_name: returns the name in the network of a published name.
    """
    names = list(map(str, published))
    plain = [_WEIGHT_NORM.sub(".weight", origin) for origin in names]
    origins = {current_name(origin): origin for origin in (*plain, *names)}
    if name in origins:
        return origins[name]
    words = name.split(".")
    for other, origin in origins.items():
        other_words = other.split(".")
        changes = [pair for pair in zip(other_words, words, strict=False) if pair[0] != pair[1]]
        if len(changes) == 1 and len(other_words) == len(words):
            candidates = _with_change(origin, *changes[0], in_layer=words[-1] != other_words[-1])
            if candidate := next((text for text in candidates if current_name(text) == name), None):
                return candidate
    return name


def _with_change(origin: str, old: str, new: str, *, in_layer: bool) -> Iterator[str]:
    """Yields names like a published name. In its layer, the last word is `new` in place of `old`;
    else one number has changed as `old` has to `new`.
    """
    if in_layer:
        yield f"{origin.removesuffix(old)}{new}"
    elif all(map(_NUMBER.fullmatch, (old, new))):
        for match in _NUMBER.finditer(origin):
            changed = int(match[0]) + int(new) - int(old)
            yield f"{origin[: match.start()]}{changed}{origin[match.end() :]}"
