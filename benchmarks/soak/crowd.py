"""Crowd of a soak: clients in threads, of which some misbehave, and the counts of their actions."""

from __future__ import annotations

import re
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, TypeVar

import grpc

from token2wav_client import ClientError

MISBEHAVING = 0.2
OVERLOAD = "try again later"  # error that any client may receive before its first audio

SceneT = TypeVar("SceneT")


@dataclass(frozen=True)
class Plan:
    """Plan of a soak: its length, clients and seed.

    Attributes:
        minutes: time during which clients start utterances.
        clients: concurrent clients.
        model: one of `MODELS`.
    """

    minutes: float
    clients: int
    seed: int
    model: str = "cosyvoice3"


class WrongAnswerError(Exception):
    """Error for a wrong answer of a server to a client."""


@dataclass(frozen=True)
class Misdeed(Generic[SceneT]):
    """One way to misbehave.

    Attributes:
        kind: such as cancel, vanish, garbage or stall.
        act: commits the misdeed, and returns the answer of the server: an error, or one word for
            other answers.
        expected: pattern of the right answers. The error "try again later" is always right.
    """

    kind: str
    name: str
    act: Callable[[SceneT], str]
    expected: str

    def commit(self, scene: SceneT) -> str:
        """Commits the misdeed and returns the answer without ids and numbers.

        Raises:
            WrongAnswerError: the answer does not match `expected`.
        """
        return self.checked(self.act(scene))

    def checked(self, answer: str) -> str:
        """Checks an answer and returns it without ids and numbers.

        Raises:
            WrongAnswerError: the answer does not match `expected`.
        """
        if not re.search(f"{self.expected}|{OVERLOAD}", answer):
            raise WrongAnswerError(f"the answer was '{answer}', expected '{self.expected}'")
        return in_general(answer)


@dataclass
class Books:
    """Counts of all clients so far."""

    spoken: int = 0
    audio_seconds: float = 0.0
    tried_again: Counter[str] = field(default_factory=Counter)
    misdeeds: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Deck(Generic[SceneT]):
    """Deck that deals misdeeds in random order.

    Args:
        kinds: kinds of misdeeds. A kind that is listed twice is twice as frequent.
    """

    def __init__(
        self, misdeeds: list[Misdeed[SceneT]], kinds: Sequence[str], random: Random
    ) -> None:
        self._misdeeds = misdeeds
        self._kinds = list(kinds)
        self._random = random
        self._lock = threading.Lock()
        self._next_kinds: list[str] = []
        self._left: dict[str, list[Misdeed[SceneT]]] = {}

    def deal(self) -> Misdeed[SceneT]:
        with self._lock:
            if not self._next_kinds:
                self._next_kinds = self._shuffled(self._kinds)
            kind = self._next_kinds.pop()
            if not self._left.get(kind):
                self._left[kind] = self._shuffled(
                    [misdeed for misdeed in self._misdeeds if misdeed.kind == kind]
                )
            return self._left[kind].pop()

    def _shuffled(self, items: list[Any]) -> list[Any]:
        return self._random.sample(items, len(items))


class Crowd(ABC, Generic[SceneT]):
    """Clients that act one after the other until the time of the plan is over."""

    def __init__(self, plan: Plan, deck: Deck[SceneT]) -> None:
        self.books = Books()
        self._plan = plan
        self._deck = deck
        self._ends_at = time.monotonic() + 60 * plan.minutes

    def run(self) -> None:
        """Runs all clients until their last actions have ended."""
        with ThreadPoolExecutor(self._plan.clients) as pool:
            list(pool.map(self._client, range(self._plan.clients)))

    @abstractmethod
    def scene(self, random: Random) -> SceneT:
        """Returns the scene of a misdeed."""

    @abstractmethod
    def utterance(self, random: Random) -> tuple[str, Callable[[], None]]:
        """Draws an utterance of a well-behaved client.

        Returns:
            A description, and a function that speaks the utterance, checks its audio and counts it.
        """

    def misbehave(self, misdeed: Misdeed[SceneT], random: Random) -> str:
        """Commits a misdeed, and returns the answer without ids and numbers.

        Raises:
            WrongAnswerError: as `Misdeed.commit`.
        """
        return misdeed.commit(self.scene(random))

    def _client(self, number: int) -> None:
        random = Random(f"{self._plan.seed} client {number}")
        while time.monotonic() < self._ends_at:
            action = "?"
            try:
                if random.random() < MISBEHAVING:
                    misdeed = self._deck.deal()
                    action = f"{misdeed.kind}, {misdeed.name}"
                    answer = self.misbehave(misdeed, random)
                    with self.books.lock:
                        self.books.misdeeds[misdeed.kind, misdeed.name, answer] += 1
                else:
                    action, speak = self.utterance(random)
                    speak()
            except (ClientError, grpc.RpcError, WrongAnswerError) as error:
                self._problem(number, action, " ".join(str(error).split()))
            except Exception:
                self._problem(number, action, traceback.format_exc())

    def _problem(self, client: int, action: str, problem: str) -> None:
        with self.books.lock:
            self.books.problems.append(f"client {client}, {action}: {problem}")
        time.sleep(1.0)  # a dead server rejects thousands of connections a second


def in_general(answer: str) -> str:
    """Replaces the ids and numbers in an answer, so that equal answers can be counted."""
    return re.sub(r"-?\b\d+(\.\d+)?\b", "N", re.sub(r"'[^']*'", "'...'", answer))
