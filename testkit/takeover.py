"""Attempts of one client to take over the open stream of another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from token2wav.serving.door.sequences import CLIENT_HEADER


@dataclass(frozen=True)
class Identity:
    """Identity that a client shows: the name that a balancer would set, and its stream key."""

    client: str = ""
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {CLIENT_HEADER: self.client} if self.client else {}

    def parameters(self, *, header: bool = False) -> dict[str, Any]:
        """Returns the parameters of a message.

        Args:
            header: whether they include the header, as Triton's front includes it.
        """
        key = {"stream_key": self.key} if self.key else {}
        return key | (self.headers if header else {})


NOBODY = Identity()


@dataclass(frozen=True)
class Attack:
    """Requests that the second client sends with the id of the first client, without waiting for
    answers.
    """

    name: str
    start: bool = False
    tokens: tuple[tuple[int, ...], ...] = ()
    end: bool = False

    def __str__(self) -> str:
        return self.name

    def requests(self) -> Iterator[tuple[tuple[int, ...], bool, bool]]:
        """Yields the tokens of each request, and whether it is the first one and the last one."""
        for number, tokens in enumerate(self.tokens):
            last = number == len(self.tokens) - 1
            yield tokens, self.start and not number, self.end and last


ATTACKS = (
    Attack("a whole stream", start=True, tokens=((1, 2, 3), (4, 5), (6,)), end=True),
    Attack("tokens", tokens=((1, 2, 3), (4,))),
    Attack("an end", tokens=((),), end=True),
    Attack("a bad token", tokens=((99_999,),)),
)
IDENTITIES = {
    "two keys": (Identity(key="mine"), Identity(key="yours")),
    "a key against none": (Identity(key="mine"), NOBODY),
    "none against a key": (NOBODY, Identity(key="yours")),
    "two names": (Identity("alice"), Identity("bob")),
    "a name against none": (Identity("alice"), NOBODY),
    "two keys under one name": (Identity("alice", "mine"), Identity("alice", "yours")),
}
