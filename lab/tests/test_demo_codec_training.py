"""The decoder of the demo codec while it is trained."""

from __future__ import annotations

import torch

from examples.demo_codec.codes import MODEL
from lab.demo_codec.training import trainable
from token2wav.families.nanocodec import read
from token2wav.families.nanocodec.network import NanoCodec


def test_a_trainable_decoder_computes_the_same() -> None:
    config = read(MODEL)
    torch.manual_seed(0)
    network = NanoCodec(config.sizes).eval()
    network.freeze()
    codes = torch.randint(20, (1, config.sizes.num_groups, 12)).int()
    with torch.no_grad():
        expected = network(codes)
        torch.testing.assert_close(trainable(network)(codes), expected, atol=1e-5, rtol=1e-4)
