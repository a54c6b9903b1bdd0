"""Prompts that are computed once and shared by all streams of a voice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from token2wav.voice import Voice

Content = TypeVar("Content")


@dataclass(eq=False)
class SharedPrompt(Generic[Content]):
    """What an engine keeps of one voice's prompt. Read-only once it is there.

    Attributes:
        content: of the engine's making.
    """

    content: Content | None = None
    references: int = 0
    computing: threading.Lock = field(default_factory=threading.Lock)


class PromptTable(Generic[Content]):
    """Prompts by the content of their voices. Safe to use from several threads.

    A prompt is computed by whoever asks first; others who ask meanwhile wait for it. One that nobody uses stays until
    there are too many, or until `evict` is called; the one goes first that was used least recently.

    Args:
        compute: makes the content for a voice.
        free: gives up a content.
        most: prompts to keep, not counting those that are in use.

    Attributes:
        acquired: how often a prompt was asked for and was there in the end.
        computed: how often `compute` has succeeded.
    """

    def __init__(self, compute: Callable[[Voice], Content], free: Callable[[Content], None], most: int = 256) -> None:
        self._compute = compute
        self._free = free
        self._most = most
        self._prompts: OrderedDict[str, SharedPrompt[Content]] = OrderedDict()
        self._lock = threading.Lock()
        self.acquired = 0
        self.computed = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def referenced(self) -> int:
        """Prompts that streams use now."""
        return sum(prompt.references > 0 for prompt in list(self._prompts.values()))

    def acquire(self, voice: Voice) -> SharedPrompt[Content]:
        """The prompt of a voice, with a reference that `release` gives back. Raises what `compute` raises."""
        with self._lock:
            prompt = self._prompts.setdefault(voice.content_hash, SharedPrompt())
            self._prompts.move_to_end(voice.content_hash)
            prompt.references += 1
        try:
            with prompt.computing:
                if prompt.content is None:
                    prompt.content = self._compute(voice)
                    self.computed += 1
        except BaseException:
            self.release(prompt)
            raise
        with self._lock:
            self.acquired += 1
        return prompt

    def release(self, prompt: SharedPrompt[Content]) -> None:
        """Gives back one reference."""
        with self._lock:
            prompt.references -= 1
            if not prompt.references and prompt.content is None:  # it could not be computed
                self._prompts = OrderedDict((key, each) for key, each in self._prompts.items() if each is not prompt)
        while len(self) - self.referenced > self._most and self.evict():
            pass

    def contents(self) -> list[Content]:
        """Of all prompts that are there."""
        with self._lock:
            return [prompt.content for prompt in self._prompts.values() if prompt.content is not None]

    def idle(self) -> list[Content]:
        """Contents that nobody refers to."""
        with self._lock:
            prompts = self._prompts.values()
            return [prompt.content for prompt in prompts if not prompt.references and prompt.content is not None]

    def evict(self) -> bool:
        """Frees the least recently used prompt that nobody refers to; says whether there was one."""
        with self._lock:
            for key, prompt in self._prompts.items():
                if not prompt.references and prompt.content is not None:
                    del self._prompts[key]
                    self._free(prompt.content)
                    return True
        return False
