"""Weights that depend on the ODE time alone are tables after loading."""

from __future__ import annotations

from testkit.models.golden import TINY
from testkit.models.tiny_model import ODE_STEPS
from testkit.utterances import a_voice, off, some_tokens
from tests.stages.rig import MEL, Parts
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.stages.cached_flow import CachedFlow


def test_loaded_model_holds_no_time_weights(parts: Parts) -> None:
    stream = StreamConfig(steps=(ODE_STEPS,))
    model = Token2Wav.load(TINY, stream=stream, runtime=RuntimeConfig(cache_mib=8))
    engine = model.pipeline.flow
    assert isinstance(engine, CachedFlow)
    loaded = engine._encoder
    assert isinstance(loaded, Flow)
    before, after = dict(parts.flow.named_parameters()), dict(loaded.named_parameters())
    gone = set(before) - set(after)
    depth = parts.config.flow.estimator.depth
    assert {name.split("estimator.")[1].rsplit(".", 1)[0] for name in gone} == {
        "time_embed.time_mlp.0",
        "time_embed.time_mlp.2",
        "norm_out.linear",
        *(f"transformer_blocks.{layer}.attn_norm.linear" for layer in range(depth)),
    }
    assert sum(value.numel() for value in after.values()) < 0.95 * sum(
        value.numel() for value in before.values()
    )
    assert (
        off(model.mel(some_tokens(60), a_voice(41)), parts.whole(some_tokens(60), a_voice(41)))
        <= MEL
    )
