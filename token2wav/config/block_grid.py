"""Block grid of a stream: where its attention blocks lie, and which blocks attend to which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BlockGrid:
    """Division of a stream into attention blocks.

    Positions are tokens or frames, counted from the start of the prompt. The prefix is the part of
    the prompt that does not depend on the tokens after the prompt. It consists of whole blocks.
    They are computed once for each voice, and every later block attends to them.

    A position attends to its own block and to earlier blocks. If `left_blocks` is negative, these
    are all earlier blocks. Otherwise these are the blocks of the prefix, and the `left_blocks`
    blocks before its own block.

    Example: `BlockGrid(25, prompt=30, prefix=25)` has block boundaries at 0, 25, 50, 75 ... The
    prompt of 30 tokens ends inside the second block. Its first block is the prefix. The second
    block also depends on the first tokens of the utterance.

    Attributes:
        block: positions in a block.
        prompt: positions in the prompt.
        prefix: positions in the prefix; a block ends there.
        prompt_padding: padding positions before the prompt, which complete its first block.
        full_prompt_attention: whether the blocks of the prefix attend to one another as if they
            were one block.
        left_blocks: visible earlier blocks besides the prefix; negative for all.
    """

    block: int
    prompt: int = 0
    prefix: int = 0
    prompt_padding: int = 0
    full_prompt_attention: bool = False
    left_blocks: int = -1

    @property
    def prefix_blocks(self) -> int:
        return -(-(self.prefix + self.prompt_padding) // self.block)

    @property
    def first_boundary(self) -> int:
        """End of the last block that contains a position of the prompt; 0 without a prompt."""
        return self.prompt + -(self.prompt + self.prompt_padding) % self.block

    def scaled(self, ratio: int) -> BlockGrid:
        """Returns the same grid in smaller units, for example frames: `ratio` of them per token."""
        return replace(
            self,
            block=ratio * self.block,
            prompt=ratio * self.prompt,
            prefix=ratio * self.prefix,
            prompt_padding=ratio * self.prompt_padding,
        )

    def block_count(self, start: int, stop: int) -> int:
        """Returns the number of blocks from `start`, where a block must begin, to `stop`. An
        incomplete last block counts.
        """
        blocks = -(-(stop + self.prompt_padding) // self.block)
        return blocks - (start + self.prompt_padding) // self.block

    def complete_stop(self, stop: int) -> int:
        """Returns the end of the last block that is complete in a stream of `stop` positions."""
        return stop - (stop + self.prompt_padding) % self.block

    def visible_blocks(self, block: int) -> list[int]:
        """Returns the indices of the blocks up to `block` that it attends to, in order.

        Under `full_prompt_attention` a block of the prefix also attends to later blocks of the
        prefix, which this list omits. Indices count from the padding before the prompt.
        """
        if self.left_blocks < 0:
            return list(range(block + 1))
        prefix_stop = min(self.prefix_blocks, block + 1)
        return [*range(prefix_stop), *range(self.first_needed(block), block + 1)]

    def visible_spans(self, start: int) -> list[tuple[int, int]]:
        """Returns start and stop of each run of earlier positions that the block that begins at
        `start` attends to, in order.
        """
        spans: list[tuple[int, int]] = []
        for block in self.visible_blocks((start + self.prompt_padding) // self.block)[:-1]:
            first = max(0, block * self.block - self.prompt_padding)
            stop = (block + 1) * self.block - self.prompt_padding
            if spans and spans[-1][1] == first:
                spans[-1] = spans[-1][0], stop
            else:
                spans.append((first, stop))
        return spans

    def first_needed(self, block: int) -> int:
        """Returns the index of the first block after the prefix that `block` attends to.

        No later block attends to a block between the prefix and this index. Block 0 begins with the
        padding.
        """
        if self.left_blocks < 0:
            return self.prefix_blocks
        return max(self.prefix_blocks, block - self.left_blocks)

    def allows(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Computes the attention mask between positions.

        Args:
            queries: (Q,) positions that attend.
            keys: (K,) positions that are attended to.

        Returns:
            (Q, K) bool, True where a query attends to a key.
        """
        query = ((queries + self.prompt_padding) // self.block)[:, None]
        key = ((keys + self.prompt_padding) // self.block)[None, :]
        if self.full_prompt_attention:
            query = query.clamp(min=self.prefix_blocks - 1)
        allowed = key <= query
        if self.left_blocks >= 0:
            allowed &= (key >= query - self.left_blocks) | (key < self.prefix_blocks)
        return allowed
