"""Plan of provisional chunks: where the next one ends, so that they cost as little as possible."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A chunk adds this much more audio than the listener needs to wait for the chunk after it. The
# estimate of the pace changes a little from token to token. Without this slack, each change would
# cause one more chunk of one token.
_SLACK_SECONDS = 0.04


@dataclass(frozen=True)
class Pace:
    """Pace of a stream."""

    token_seconds: float  # mean time from one token to the next; above 0
    audio_seconds: float  # audio of a token
    chunk_seconds: float  # from the decision about a provisional chunk to its audio


def next_end(pace: Pace, spoken: int, arrived: int, lead: float, block_seconds: float) -> int:
    """Returns the position at which the next provisional chunk ends.

    A provisional chunk is computed from the start of its block, so a chunk that ends later in the
    block costs more. The first chunks of a block therefore end as early as possible: each chunk
    adds just enough audio for the listener to wait for the chunk after it, and the last one enough
    to wait for the whole block. So there are as few chunks as possible.

    The ends are found from the last chunk back to the next one. For example, audio for 8 tokens is
    left after each chunk, and the whole block can be heard 6 tokens after position 19. Then chunks
    end at 19, at 11 and at 3.

    Args:
        spoken: position up to which the listener has audio.
        arrived: latest position at which a provisional chunk could end now.
        lead: seconds of audio that the listener has left.
        block_seconds: seconds until the audio of the whole block can be heard.

    Returns:
        Position after `spoken`; `spoken` itself if no provisional chunk is needed before the whole
        block, or if tokens come too slowly for a plan.
    """

    def needed(seconds: float) -> int:
        """Returns the position up to which the listener must have audio, to wait so long."""
        missing = max(0.0, seconds - lead)
        return spoken + math.ceil(missing / pace.audio_seconds - 1e-9)

    end, seconds = spoken, block_seconds
    while needed(seconds) > spoken:
        before = needed(seconds + _SLACK_SECONDS)
        if end > spoken and before >= end:
            return spoken
        end = before
        seconds = max(0, end - arrived) * pace.token_seconds + pace.chunk_seconds
    return end
