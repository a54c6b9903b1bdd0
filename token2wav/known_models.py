"""Models on the Hugging Face Hub that this project reads.

They are the rows of `models.csv`: a new name is one line there.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

_HEADER = ("name", "repository", "family", "rate", "MB", "licence", "tokens of")
NOTE = (  # below the table
    "rate: tokens a second. MB: to fetch, as published, or computed from published sizes.\n"
    "-: not confirmed. Every decoder was compared with its public code, with random weights;\n"
    "the weights of these models were never read by this project."
)


@dataclass(frozen=True)
class KnownModel:
    """Row of `models.csv`.

    Attributes:
        repo: name on the hub, `org/name`.
        family: package of `token2wav.families` that reads the folder.
        tokens_of: models whose tokens the decoder turns into audio; empty if none is known.
        rate: tokens in a second of audio, with four digits.
        megabytes: size of the files and tensors that are fetched, in units of 10^6 bytes; empty if
            it is not known before the hub is asked.
        licence: licence of the weights; empty if it could not be confirmed.
        verified: what the decoder was compared with. `public code` is the code of the authors, with
            random weights.
    """

    alias: str
    repo: str
    family: str
    tokens_of: str
    rate: str
    megabytes: str
    licence: str
    verified: str


@cache
def known_models() -> tuple[KnownModel, ...]:
    with Path(__file__).with_name("models.csv").open(encoding="utf-8", newline="") as file:
        return tuple(KnownModel(**row) for row in csv.DictReader(file))


def known_model(alias: str) -> KnownModel | None:
    """Returns the row of an alias, without regard to case; None if there is none."""
    return next((model for model in known_models() if model.alias == alias.lower()), None)


def suggestion(text: str) -> str:
    """Returns the end of a message that suggests the aliases most like a text; empty for none."""
    aliases = [model.alias for model in known_models()]
    name = text.lower()
    near = [alias for alias in aliases if len(name) > 2 and name in alias]
    near = near or get_close_matches(name, aliases, cutoff=0.7)
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def table() -> Iterator[tuple[str, ...]]:
    """Yields the cells of each line of the table: first the header, then a line for each model."""
    yield _HEADER
    for model in known_models():
        cells = (model.rate, model.megabytes, model.licence, model.tokens_of)
        yield model.alias, model.repo, model.family, *(cell or "-" for cell in cells)


def facts(model: KnownModel) -> dict[str, object]:
    """Returns a row for JSON, with numbers, and null where a cell is empty."""
    return {
        **{name: text or None for name, text in asdict(model).items()},
        "rate": float(model.rate),
        "megabytes": int(model.megabytes) if model.megabytes else None,
    }
