"""A model that computes every chunk anew under the streaming mask: the oracle of the one that remembers."""

from __future__ import annotations

from pathlib import Path

from tests.support.batches import WHOLE_BLOCKS
from token2wav import StreamConfig, Token2Wav
from token2wav.execution.recompute import RecomputeFlow
from token2wav.families.bigvgan.build import recomputed_bigvgan
from token2wav.families.bigvgan.network import BigVGAN
from token2wav.families.cosyvoice3.build import recomputed_hift
from token2wav.families.cosyvoice3.config import read_cosyvoice3
from token2wav.families.cosyvoice3.weights import load_flow, load_flow_noise, load_source_noise, load_vocoder
from token2wav.networks.ode import EulerSolver


def recomputing(folder: Path, stream: StreamConfig | None = None) -> Token2Wav:
    stream, config = stream or WHOLE_BLOCKS, read_cosyvoice3(folder)
    flow, vocoder = load_flow(folder, config), load_vocoder(folder, config)
    guidance, allowed = config.flow.inference_cfg_rate, config.allowed_steps(stream.steps)
    solvers = {steps: EulerSolver(flow.estimator, steps, guidance, config.schedule) for steps in allowed}
    engine = RecomputeFlow(config, flow, load_flow_noise(folder, config), solvers, left_blocks=config.window(stream))
    if isinstance(vocoder, BigVGAN):
        return Token2Wav(config, engine, recomputed_bigvgan(vocoder), stream)
    return Token2Wav(config, engine, recomputed_hift(vocoder, load_source_noise(folder, config)), stream)
