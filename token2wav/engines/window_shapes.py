"""Which windows of the vocoder will come, so that they can be prepared."""

from __future__ import annotations

from token2wav.flow_config import FlowConfig
from token2wav.vocoder.stream_rows import RowLayout
from token2wav.vocoder.window_batch import WindowShape


def likely_windows(layout: RowLayout, flow: FlowConfig, hops: tuple[int, int], most_streams: int) -> list[WindowShape]:
    """Shapes that take every chunk, not too loosely, for powers of two of streams.

    Hops grow by doubling, and others of their range fit the next longer window. A first chunk is longer than its hop
    by what fills the prompt's last block. The longest windows of both kinds are for last chunks, which may have as many
    tokens more as a chunk waits for, and need room behind their end.

    Args:
        layout: of what streams keep.
        flow: whose chunks they are.
        hops: tokens of the first and of the longest hop.
        most_streams: in a batch, a power of two.
    """
    ratio, block = flow.token_mel_ratio, flow.block_tokens
    first, longest = hops
    ending = ratio * flow.lookahead_tokens + layout.lookahead
    hops_between = [first << doublings for doublings in range((longest // first).bit_length())]
    behind = {layout.frames + ratio * hop for hop in (*hops_between, longest)}
    behind.add(layout.frames + ratio * longest + ending)
    whole = {ratio * first, ratio * (first + block // 2), ratio * (first + block) + ending}
    return [
        WindowShape(1 << doublings, frames, history)
        for doublings in range(most_streams.bit_length())
        for history, lengths in ((False, whole), (True, behind))
        for frames in sorted(lengths)
    ]
