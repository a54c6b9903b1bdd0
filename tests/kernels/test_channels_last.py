"""HiFT on kernels with rounded operands: its audio is as close to exact audio as that of products
that are rounded on torch. Float16 has as many bits of mantissa as TF32.
"""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from testkit.kernel_vocoder import DEVICE, ROUNDING, a_network, a_stage, spoken
from token2wav.kernels.convolution import Precision, tf32
from token2wav.layers import streaming

# on a GPU, the tests belong to the tests that the GPU must pass
pytestmark = [
    pytest.mark.usefixtures("nan_in_new_signals"),
    *([pytest.mark.gpu] if DEVICE.type == "cuda" else []),
]


class _RoundedProducts(TorchFunctionMode):
    """Rounding of the inputs of all products of the generator to 10 bits of mantissa, on torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        # kernels of the STFT and of its inverse have one channel
        if func in (torch.conv1d, torch.conv_transpose1d):
            x, weight, *rest = args
            if weight.dtype == torch.float32 and 1 not in weight.shape[:2]:
                return func(tf32(x), tf32(weight), *rest, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["tf32", "float16"])
def test_rounding_costs_what_rounded_inputs_of_products_cost(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short convolutions would be products with packed weights, which the mode does not see.
    monkeypatch.setattr(streaming, "_multiplies", lambda *_: False)
    network = a_network("causal")
    stage = a_stage(network, precision)
    held = network.lookahead_frames
    [(mel, audio)] = spoken(stage, {held + 4: [held + 1, held + 4]})
    exact = stage.whole(mel)
    with _RoundedProducts():
        rounded = stage.whole(mel)

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).square().mean().sqrt())

    assert distance(rounded, exact) > ROUNDING
    # Sums in another order round some of the next inputs the other way, so the two roundings are
    # alike in size and only in part equal.
    assert distance(audio, rounded) <= 0.7 * distance(rounded, exact)
    assert distance(audio, exact) <= 1.2 * distance(rounded, exact)
