"""Window transformer: how far a position sees. `test_streaming.py` and the contract of codecs
compare streams with the whole.
"""

from __future__ import annotations

import torch
from torch import nn

from token2wav.layers.feed_forward import FeedForward
from token2wav.layers.window_transformer import TransformerSizes, WindowTransformer


@torch.inference_mode()
def test_a_position_sees_its_window_in_every_layer() -> None:
    torch.manual_seed(0)
    sizes = TransformerSizes(layers=2, width=8, heads=2, dim_head=4, window=3, rope_base=10_000.0)
    network = WindowTransformer(sizes, nn.LayerNorm, lambda: FeedForward(8, 16))
    for parameter in network.parameters():
        parameter.normal_(std=0.5)
    network.place()
    x = torch.randn(1, 20, 8)
    changed = x.clone()
    changed[:, 7, 0] += 1
    reached = (network(changed) - network(x)).abs().amax(dim=2)[0] > 1e-6
    # two layers, each of which sees two positions before its own
    assert reached.nonzero().flatten().tolist() == [7, 8, 9, 10, 11]
