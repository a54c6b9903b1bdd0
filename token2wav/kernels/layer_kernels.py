"""Layers of torch that compute on kernels."""

from __future__ import annotations

from torch import nn

from token2wav.kernels import context
from token2wav.kernels import window_attention as attention
from token2wav.kernels.anti_aliased import anti_aliased
from token2wav.layers.streaming import ContextKernels, Streaming
from token2wav.layers.window_attention import WindowAttention
from token2wav.layers.window_transformer import WindowTransformerAttention
from token2wav.networks.bigvgan import AntiAliased


def set_kernels(network: nn.Module) -> None:
    """Lets kernels write the inputs of a network's layers, compute anti-aliased activations, and
    attend in windows.
    """
    context_kernels = ContextKernels(context.with_context, context.windows, context.depthwise)
    for module in network.modules():
        # length of a state, or channels of a head in a ring
        length = (0, *module.state_shape)[-1] if isinstance(module, Streaming) else 0
        if isinstance(module, AntiAliased):
            module.kernel = anti_aliased
        elif isinstance(module, WindowTransformerAttention):
            module.join()
        elif isinstance(module, WindowAttention) and length <= attention.MOST_CHANNELS:
            module.state_kernel = attention.window_attention
        elif isinstance(module, Streaming) and length <= context.MOST_REACH:
            module.context_kernels = context_kernels
