"""Crowd of a soak: clients in threads, of which some misbehave, and the counts of their actions."""

from __future__ import annotations

import re
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Generic, TypeVar

import grpc

from benchmarks.soak.lines import Line
from token2wav_client import ClientError

MISBEHAVING = 0.2
OVERLOAD = "try again later"  # error that any client may receive before its first audio
# Answers to a misdeed that are no error.
NOTHING, AUDIO = "left before any answer", "audio"
BROKEN = "connection: "  # refused or broken off
_LONGEST_ANSWER = 200  # characters in the counts

Answers = dict[str, dict[str, dict[str, int]]]  # counts by kind and name of a misdeed, and answer


@dataclass(frozen=True)
class Plan:
    """Plan of a soak: its length, clients and seed."""

    minutes: float  # time during which clients start utterances
    clients: int  # concurrent clients
    seed: int
    model: str = "cosyvoice3"  # one of `MODELS`


class WrongAnswerError(Exception):
    """Error for a wrong answer of a server to a client."""


@dataclass(frozen=True)
class Scene:
    """Scene of a misdeed: the lines that the client may send, and its dice."""

    lines: list[Line]
    random: Random

    def line(self, at_least: int = 0) -> Line:
        return self.random.choice([line for line in self.lines if len(line.tokens) >= at_least])

    def moment(self, at_least_s: float = 0.0, at_most_s: float = 1.0) -> None:
        time.sleep(self.random.uniform(at_least_s, at_most_s))

    def by_chance(self, share: float = 0.5) -> bool:
        return self.random.random() < share


T = TypeVar("T")
SceneT = TypeVar("SceneT", bound=Scene)
# Commits a misdeed, and returns the answer of the server: an error, or one word for other answers.
Act = Callable[[SceneT], str]
# Misdeeds by kind (such as cancel, vanish, garbage or stall) and name: each act, and a pattern of
# the right answers. The error "try again later" is always right.
Misdeeds = Mapping[str, Mapping[str, tuple[Act[SceneT], str]]]


@dataclass(frozen=True)
class Books:
    """Records of all clients so far. Threads need no lock, because `append` is atomic.

    Attributes:
        begun: times at which an attempt to speak an utterance, or a misdeed, began. A gateway's
            utterances are not recorded here, because one conversation has several.
        spoken: seconds of each utterance whose audio was right.
        excused: failures of utterances that are not the server's fault.
        misdeeds: kind and name of each misdeed, and the answer.
        problems: a sentence for each action with a wrong answer.
    """

    begun: list[float] = field(default_factory=list)
    spoken: list[float] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)
    misdeeds: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def unaccounted(self) -> int:
        """Returns the number of beginnings without an end."""
        ended = len(self.spoken) + len(self.excused) + len(self.misdeeds) + len(self.problems)
        return len(self.begun) - ended

    def answers(self) -> Answers:
        """Returns the counts of each answer by kind and name of the misdeed."""
        counts = Counter((kind, name, in_general(answer)) for kind, name, answer in self.misdeeds)
        table: Answers = {}
        for (kind, name, answer), count in sorted(counts.items()):
            table.setdefault(kind, {}).setdefault(name, {})[answer] = count
        return table


class Crowd(ABC, Generic[SceneT]):
    """Clients that act one after the other until the time of the plan is over.

    Args:
        kinds: kinds of misdeeds. A kind that is listed twice is twice as frequent.
    """

    def __init__(self, plan: Plan, misdeeds: Misdeeds[SceneT], kinds: Sequence[str]) -> None:
        self.books = Books()
        self._plan = plan
        self._ends_at = time.monotonic() + 60 * plan.minutes
        random = Random(f"{plan.seed} misdeeds")
        self._kinds = shuffled(kinds, random)
        self._of_kind = {kind: shuffled([*misdeeds[kind].items()], random) for kind in kinds}
        self._dealing = threading.Lock()

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

    def excuses(self, failure: str, began: float) -> bool:
        """Returns whether a failure of an action that began at a time is not the server's fault."""
        return False

    def _next_misdeed(self) -> tuple[str, str, Act[SceneT], str]:
        """Returns kind and name of a misdeed, its act, and the pattern of the right answers."""
        with self._dealing:
            kind = next(self._kinds)
            name, (act, expected) = next(self._of_kind[kind])
        return kind, name, act, expected

    def _misbehave(self, act: Act[SceneT], expected: str, random: Random) -> str:
        """Commits a misdeed, and returns the answer for the books."""
        began = time.monotonic()
        self.books.begun.append(began)
        try:
            answer = act(self.scene(random))
        except OSError as error:
            answer = broken(error)
        except (ClientError, grpc.RpcError) as error:
            if not self.excuses(answer := described(error), began):
                raise
        if self.excuses(answer, began):
            return f"in an outage: {answer}"
        if not re.search(f"{expected}|{OVERLOAD}", answer):
            raise WrongAnswerError(f"the answer was '{answer}', expected '{expected}'")
        return answer

    def _client(self, number: int) -> None:
        random = Random(f"{self._plan.seed} client {number}")
        while time.monotonic() < self._ends_at:
            action = "?"
            try:
                if random.random() < MISBEHAVING:
                    kind, name, act, expected = self._next_misdeed()
                    action = f"{kind}, {name}"
                    answer = self._misbehave(act, expected, random)
                    self.books.misdeeds.append((kind, name, answer))
                else:
                    action, speak = self.utterance(random)
                    speak()
            except Exception as error:
                known = isinstance(error, ClientError | grpc.RpcError | WrongAnswerError)
                problem = " ".join(str(error).split()) if known else traceback.format_exc()
                self.books.problems.append(f"client {number}, {action}: {problem}")
                time.sleep(1.0)  # a dead server rejects thousands of connections a second


def shuffled(items: Sequence[T], random: Random) -> Iterator[T]:
    """Yields all items in random order, again and again."""
    while True:
        yield from random.sample(items, len(items))


def described(error: ClientError | grpc.RpcError) -> str:
    """Describes an error of our client, or of a gRPC call on its own."""
    if isinstance(error, grpc.Call):
        return f"{BROKEN}{error.code().name} {error.details()}"
    return str(error)


def broken(error: Exception) -> str:
    """Describes a connection that is refused or broken off."""
    return f"{BROKEN}{type(error).__name__} {error}".strip()


def in_general(answer: str) -> str:
    """Replaces the ids and numbers in an answer, so that equal answers can be counted."""
    general = re.sub(r"-?\b\d+(\.\d+)?\b", "N", re.sub(r"'[^']*'", "'...'", answer))
    return general[:_LONGEST_ANSWER]
