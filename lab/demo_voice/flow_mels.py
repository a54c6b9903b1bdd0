"""Mels that the flow makes of the tokens of the corpus, as training data for the vocoder.

    python -m lab.demo_voice.flow_mels --data DIR --hours 1

Mels of the flow differ from mels of recordings, and the vocoder has to work with both. Run the
command again after the flow was trained further.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from lab.demo_voice import corpus, front_end
from lab.demo_voice.corpus import Utterances
from lab.demo_voice.folder import CORPUS, FLOW_MELS, FRONT_END, TEMPLATE, TRAINING
from lab.demo_voice.front_end import Heard
from lab.demo_voice.training import averaged_weights
from token2wav.config.block_grid import BlockGrid
from token2wav.families.cosyvoice3 import CosyVoice3Config, FlowConfig
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.networks.masks import block_mask
from token2wav.networks.ode import EulerSolver
from token2wav_server.demo.speaker import MEL_PER_TOKEN, RATE_HZ, TOKEN_SAMPLES

_PROMPT, _MADE = 50, 200  # tokens of the prompt, and of the made mel, in one window
_BATCH = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Generate mels with the newest flow, for the training of the vocoder."
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder of corpus and checkpoints"
    )
    parser.add_argument("--hours", type=float, default=1.0, help="hours of speech (default: 1)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    make(options.data, options.hours)


def make(data: Path, hours: float) -> None:
    """Writes the mels (frames, 80) that the newest flow makes of the first hours of a corpus."""
    recordings = corpus.read(data / CORPUS)
    config = CosyVoice3Config.read(TEMPLATE).flow
    heard = front_end.hear(data / FRONT_END, config, recordings)
    weights, _ = averaged_weights(data / TRAINING, "flow")
    flow = Flow(config)
    flow.load_state_dict(weights)
    windows = min(
        math.ceil(hours * 3600 * RATE_HZ / TOKEN_SAMPLES / _MADE),
        _windows(len(heard.tokens), config),
    )
    np.save(data / FLOW_MELS, flow_mels(flow.eval(), config, recordings, heard, windows))


def _windows(tokens: int, config: FlowConfig) -> int:
    return (tokens - _PROMPT - config.pre_lookahead_len) // _MADE


@torch.inference_mode()
def flow_mels(
    flow: Flow, config: FlowConfig, recordings: Utterances, heard: Heard, windows: int
) -> NDArray[np.float16]:
    """Makes mels of the first tokens of a corpus, with the attention mask of streaming.

    Each window has its own prompt: the recording before it.

    Returns:
        Mels (frames, 80). The first frames, the prompt of the first window, are copied from the
        recording.
    """
    rng = torch.Generator().manual_seed(0)
    solver = EulerSolver(flow.estimator, config.n_timesteps, config.inference_cfg_rate)
    tokens, speakers = torch.from_numpy(heard.tokens).long(), torch.from_numpy(heard.speakers)
    mel = torch.from_numpy(recordings.mel)
    frames, shown = MEL_PER_TOKEN * (_PROMPT + _MADE), MEL_PER_TOKEN * _PROMPT
    mask = block_mask(BlockGrid(flow.estimator.block_frames), frames)
    made = [mel[:shown]]
    for first in tqdm(range(0, windows, _BATCH), desc="flow mels", unit="batch"):
        starts = _MADE * torch.arange(first, min(first + _BATCH, windows))
        reach = torch.arange(_PROMPT + _MADE + config.pre_lookahead_len)
        mu = flow.mu(tokens[starts[:, None] + reach], last=False)
        prompt = torch.zeros_like(mu)
        for row, at in enumerate(starts.tolist()):
            prompt[row, :, :shown] = mel[MEL_PER_TOKEN * at :][:shown].T
        speaker = speakers[torch.randint(len(speakers), (len(starts),), generator=rng)]
        noise = torch.randn(mu.shape, generator=rng)
        mels = solver.solve(noise, mu, flow.speaker(speaker), prompt, mask)[..., shown:].transpose(
            1, 2
        )
        made.append(mels.flatten(0, 1).half())
    return torch.cat(made).numpy()


if __name__ == "__main__":
    main()
