"""Models that tests put together by hand: stages of their own, and the model that recomputes every
chunk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testkit.batches import WHOLE_BLOCKS
from token2wav import StreamConfig, Token2Wav
from token2wav.assembly import load_network
from token2wav.families.cosyvoice3.noise import load_flow_noise, load_source_noise
from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.ode import EulerSolver
from token2wav.published.registry import read_config
from token2wav.stages.recompute import RecomputeFlow, RecomputeVocoder
from token2wav.stages.stage import Stages, StageSummary


def two_stages(flow: Any, vocoder: Any) -> Stages:
    return Stages({"flow": flow, "vocoder": vocoder}, StageSummary("torch", "float32", "cpu"))


def recomputing(folder: Path, stream: StreamConfig | None = None) -> Token2Wav:
    """Loads a model that recomputes every chunk under the streaming mask: the oracle of the cached
    model.
    """
    config: Any = read_config(folder)
    stream = stream or WHOLE_BLOCKS
    flow, vocoder = load_network(folder, config, "flow"), load_network(folder, config, "vocoder")
    guidance, allowed = config.flow.inference_cfg_rate, config.allowed_steps(stream.steps)
    solvers = {
        steps: EulerSolver(flow.estimator, steps, guidance, config.schedule) for steps in allowed
    }
    engine = RecomputeFlow(
        config, flow, load_flow_noise(folder, config), solvers, left_blocks=config.window(stream)
    )
    if isinstance(vocoder, BigVGAN):
        return Token2Wav(config, two_stages(engine, RecomputeVocoder(vocoder)), stream)
    noise = load_source_noise(folder, config)
    return Token2Wav(config, two_stages(engine, RecomputeVocoder(vocoder, noise)), stream)
