"""Windows of a decoder that reads a whole utterance: how a stream is divided into pieces that are
decoded one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from token2wav.errors import ConfigError


class Window(NamedTuple):
    """Window of a stream: it decodes the tokens from `first` to `last`, and gives the audio of the
    tokens from `start` to `stop`. Positions are tokens from the start of the stream.

    Attributes:
        position: position of the first token for the network, which counts from the start of its
            part (`Windows.part`).
        fade_stop: end of the fade. From `stop` to `fade_stop`, the audio fades into the audio of
            the next window.
    """

    first: int
    position: int
    start: int
    stop: int
    fade_stop: int
    last: int


@dataclass(frozen=True)
class Windows:
    """Division of a stream into windows, which depends on the number of its tokens alone. All
    lengths are tokens.

    Attributes:
        block: tokens of audio in each window; fewer in the last one.
        left, right: context before and after these tokens, as far as the stream has it.
        overlap: tokens after the block, in which the audio fades into the audio of the next window.
        part: tokens after which the positions of the network begin again. The context on the left
            does not reach into the part before.
    """

    block: int
    left: int
    right: int
    overlap: int
    part: int

    def __post_init__(self) -> None:
        if self.part % self.block:
            raise ConfigError(
                f"stream.block_tokens: {self.block} does not divide {self.part}, the tokens of a "
                "part"
            )
        if self.overlap > min(self.block, self.right):
            raise ConfigError(
                f"stream.overlap_tokens: {self.overlap} is more than the window, {self.block} "
                f"tokens, or its context on the right, {self.right} tokens"
            )

    @property
    def past(self) -> int:
        """Most tokens that a window has before its block: `left`, as far as a part has them."""
        return min(self.left, self.part - self.block)

    @property
    def longest(self) -> int:
        """Most tokens that a window decodes."""
        return self.past + self.block + self.right

    def over(self, start: int, stop: int, end: int) -> Iterator[Window]:
        """Yields the windows of the tokens from `start` to `stop`.

        Args:
            start: multiple of the block.
            stop: multiple of the block, or the end of the stream.
            end: position up to which tokens are known: the end of the stream, or at least `stop`
                and the context on the right.
        """
        for begin in range(start, stop, self.block):
            finish, part = min(begin + self.block, stop), begin - begin % self.part
            first = max(part, begin - self.left)
            yield Window(
                first,
                first - part,
                begin,
                finish,
                min(finish + self.overlap, end),
                min(finish + self.right, end),
            )


# Windows of whole utterances, for a decoder with unlimited positions. 30,000 tokens bound the
# memory of attention.
ONE_PART = Windows(30_000, left=0, right=1000, overlap=0, part=30_000)
