"""Training of one network from its last checkpoint.

    python -m lab.demo_voice.train flow --data DIR --minutes 60

SIGTERM saves a checkpoint and ends the training.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch

from lab.demo_voice import corpus, front_end
from lab.demo_voice.ear import EarTraining, trained_ear
from lab.demo_voice.flow_training import FlowTraining
from lab.demo_voice.folder import CORPUS, FLOW_MELS, FRONT_END, TEMPLATE, TRAINING
from lab.demo_voice.tokenizer_training import TokenizerTraining
from lab.demo_voice.training import Training, train
from lab.demo_voice.vocoder_training import VocoderTraining
from token2wav.families.cosyvoice3 import CosyVoice3Config


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Continue the training of one network of the demo voice."
    )
    parser.add_argument("network", choices=("ear", "tokenizer", "flow", "hift"))
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder of corpus and checkpoints"
    )
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--minutes", type=float, default=math.inf, help="training time in minutes")
    limit.add_argument("--steps", type=int, help="number of training steps")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument(
        "--device", default="cpu", help="device for the training of the flow (default: cpu)"
    )
    parser.add_argument("--nice", type=int, default=19, help="priority, 19 is the lowest (default)")
    options = parser.parse_args()
    os.nice(options.nice)
    torch.set_num_threads(options.threads)
    if options.device != "cpu" and options.network != "flow":
        parser.error(f"--device: only the flow can be trained on {options.device}")
    torch.backends.cuda.matmul.allow_tf32 = True  # several times as fast as exact products
    recordings = corpus.read(options.data / CORPUS)
    config = CosyVoice3Config.read(TEMPLATE)
    training: Training
    folder = options.data / TRAINING
    if options.network == "ear":
        training = EarTraining(recordings)
    elif options.network == "tokenizer":
        training = TokenizerTraining(config.flow, recordings, trained_ear(folder))
    elif options.network == "flow":
        heard = front_end.hear(options.data / FRONT_END, config.flow, recordings)
        training = FlowTraining(config.flow, recordings, heard, trained_ear(folder), options.device)
    else:
        mels = options.data / FLOW_MELS
        training = VocoderTraining(
            config.vocoder,
            recordings,
            trained_ear(folder),
            np.load(mels) if mels.exists() else None,
        )
    train(training, folder, minutes=options.minutes, steps=options.steps)


if __name__ == "__main__":
    main()
